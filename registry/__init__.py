"""The generic core: operators, variants, tolerances, proofs, ledger and recipes. It knows nothing of Fractus."""

from registry.catalogue import Bound, Catalogue, UnknownNameError, load
from registry.declare import DTYPES, PROPERTIES, Case, Operator, Option, Tolerance, Variant, operator, variant
from registry.tree import Bundle, leaves, map_leaves

__all__ = [
    "DTYPES",
    "PROPERTIES",
    "Bound",
    "Bundle",
    "Case",
    "Catalogue",
    "Operator",
    "Option",
    "Tolerance",
    "UnknownNameError",
    "Variant",
    "leaves",
    "load",
    "map_leaves",
    "operator",
    "variant",
]
