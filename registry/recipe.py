"""Recipes: which variant of each operator an engine and its trainer are built from."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry.catalogue import unknown
from registry.settings import settings
from registry.static import StaticCatalogue, enumerate_static

AUTO = "auto"


@dataclass(frozen=True)
class Recipe:
    """Operator to variant name, with options by operator. ``auto`` takes an entry only where it is proven."""

    name: str
    variants: Mapping[str, str]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    auto: bool = False

    def override(self, operator: str, variant: str, **options: Any) -> Recipe:
        """The same recipe with another variant of one operator."""
        changed = "".join(f":{key}={value}" for key, value in sorted(options.items()))
        return Recipe(
            name=f"{self.name},{operator}={variant}{changed}",
            variants={**self.variants, operator: variant},
            options={**self.options, operator: options},
            auto=self.auto,
        )


def load_recipe(spec: str, catalogue: StaticCatalogue | None = None) -> Recipe:
    """A recipe from ``reference``, ``production``, ``auto``, a TOML file, or overrides ``O=V[:option=value],O=V``.

    Overrides stand on the recipe named before them, or on ``reference``. Raises ``ValueError`` for a
    file that is not a recipe and ``UnknownNameError`` (with the near name) for what does not exist.
    """
    catalogue = enumerate_static() if catalogue is None else catalogue
    first, *rest = [part.strip() for part in spec.split(",") if part.strip()] or [""]
    if "=" in first:
        base, overrides = _read("reference", catalogue), [first, *rest]
    else:
        base, overrides = _read(first, catalogue), rest
    for override in overrides:
        operator, _, choice = override.partition("=")
        variant, *settings_ = choice.split(":")
        options = dict(_option(override, setting) for setting in settings_)
        base = base.override(operator.strip(), variant.strip(), **options)
    recipe = Recipe(spec, base.variants, base.options, base.auto)
    _check(recipe, catalogue)
    return recipe


def _option(override: str, setting: str) -> tuple[str, int]:
    name, _, value = setting.partition("=")
    if not value.lstrip("-").isdigit():
        raise ValueError(f"{override!r}: option {setting!r} is not of the form name=integer")
    return name, int(value)


def recipe_names() -> list[str]:
    """The recipes that the checkout carries, and ``auto``."""
    return [*sorted(path.stem for path in settings().recipes.glob("*.toml")), AUTO]


def _read(name: str, catalogue: StaticCatalogue) -> Recipe:
    if name == AUTO:
        production = _read("production", catalogue)
        return Recipe(AUTO, production.variants, production.options, auto=True)
    path = Path(name) if name.endswith(".toml") else settings().recipes / f"{name}.toml"
    if not path.is_file():
        raise unknown("recipe", name, recipe_names())
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    if not isinstance(table.get("variants"), dict):
        raise ValueError(f'{path} has no [variants] table of operator = "variant"')
    references = {o.name: o.reference for o in catalogue.operators.values()}
    return Recipe(name, {**references, **table["variants"]}, table.get("options", {}))


def _check(recipe: Recipe, catalogue: StaticCatalogue) -> None:
    for operator, variant in recipe.variants.items():
        if operator not in catalogue.operators:
            raise unknown("operator", operator, catalogue.operators)
        names = {v.name for v in catalogue.variants.values() if v.operator == operator}
        if variant not in names:
            raise unknown(f"variant of {operator}", variant, names)
        declared = catalogue.variants[f"{operator}/{variant}"].options
        for option, value in recipe.options.get(operator, {}).items():
            if option not in declared:
                raise unknown(f"option of {operator}/{variant}", option, declared)
            _, low, high = declared[option]
            if not low <= value <= high:
                raise ValueError(f"{operator}/{variant}: {option}={value} lies outside the proven range {low}..{high}")
