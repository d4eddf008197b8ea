"""The generic core: operators, variants, tolerances, proofs, ledger and recipes. It knows nothing of Fractus."""

from registry.catalogue import Bound, Catalogue, UnknownNameError, load
from registry.declare import DTYPES, PROPERTIES, Case, Operator, Option, Tolerance, Variant, operator, variant
from registry.ledger import Ledger
from registry.recipe import Recipe, load_recipe
from registry.records import Proof
from registry.resolve import Resolved, UnprovenVariantError, device_class, resolve
from registry.static import enumerate_static
from registry.tree import Bundle, leaves, map_leaves

__all__ = [
    "DTYPES",
    "PROPERTIES",
    "Bound",
    "Bundle",
    "Case",
    "Catalogue",
    "Ledger",
    "Operator",
    "Option",
    "Proof",
    "Recipe",
    "Resolved",
    "Tolerance",
    "UnknownNameError",
    "UnprovenVariantError",
    "Variant",
    "device_class",
    "enumerate_static",
    "leaves",
    "load",
    "load_recipe",
    "map_leaves",
    "operator",
    "resolve",
    "variant",
]
