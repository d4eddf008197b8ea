"""``proofs --explain``: what each property guarantees and what it does not, from the properties' own docstrings."""

from __future__ import annotations

import importlib

from registry import PROPERTIES
from registry.settings import settings


def text() -> str:
    """One paragraph a property."""
    paragraphs = []
    for name in PROPERTIES:
        module = importlib.import_module(f"{settings().properties}.{name}")
        paragraphs.append((module.__doc__ or name).strip())
    return "\n\n".join(paragraphs)
