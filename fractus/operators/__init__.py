"""One module an operator: its contract, its cases, its reference and every other variant."""
