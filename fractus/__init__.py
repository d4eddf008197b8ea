"""The Fractus body: the reference model, and one module an operator with its contract, reference and variants."""
