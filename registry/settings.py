"""Where this checkout keeps its operators, recipes and ledger: ``[tool.registry]`` of its pyproject.toml."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Settings:
    """The checkout's places: operator packages, recipe folder, ledger folder, the package of properties.

    ``engine``, ``engine_tolerance`` and ``engine_proof`` are ``module:name`` of what a recipe's own proof is about.
    """

    packages: tuple[str, ...]
    recipes: Path
    ledger: Path
    properties: str
    engine: str
    engine_tolerance: str
    engine_proof: str


@functools.cache
def settings(root: Path = ROOT) -> Settings:
    """Read ``[tool.registry]``; ``ValueError`` when the file or the table is not there."""
    path = root / "pyproject.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("registry") if path.is_file() else None
    if table is None:
        raise ValueError(f"{path} has no [tool.registry]: run from a checkout installed with pip install -e")
    return Settings(
        packages=tuple(table["packages"]),
        recipes=root / table["recipes"],
        ledger=root / table["ledger"],
        properties=table["properties"],
        engine=table["engine"],
        engine_tolerance=table["engine_tolerance"],
        engine_proof=table["engine_proof"],
    )
