"""The frozen catalogue of operators and variants, and the binding of a variant to its operator's contract."""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from registry.declare import ATTRIBUTE, Operator, Variant
from registry.settings import settings


class UnknownNameError(ValueError):
    """A name that is not in the catalogue; the message suggests near ones."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """An error that names what was asked for, the nearest known name and all that exist."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UnknownNameError(f"no {kind} {name!r}{hint} (there are: {', '.join(names) or 'none'})")


@dataclass(frozen=True)
class Bound:
    """A variant with its options, called through its operator's contract.

    Calling it checks the arguments, expands defaults, refuses what the variant does not claim with a
    ``ValueError`` and runs the variant's arithmetic.
    """

    operator: Operator
    variant: Variant
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.operator.contract(self.arithmetic, *arguments, **keywords)

    def arithmetic(self, *arguments: Any) -> Any:
        """The variant itself on arguments that the contract has checked, refusing what it does not claim."""
        for name in self.variant.conditions:
            refusal = self.operator.conditions[name](*arguments)
            if refusal is not None:
                raise ValueError(f"{self.variant.key} claims only {name}: {refusal}")
        return self.variant.function(*arguments, **self.options)

    def prepare(self, value: Any) -> Any:
        """Run the variant's ``prepare`` on the fixed input (a shard), or hand it through."""
        return value if self.variant.prepare is None else self.variant.prepare(value)

    @property
    def label(self) -> str:
        """``operator/variant`` with the options that differ from their defaults."""
        changed = {k: v for k, v in self.options.items() if v != self.variant.options[k].default}
        extra = "".join(f",{name}={value}" for name, value in sorted(changed.items()))
        return f"{self.variant.key}{extra}"


@dataclass(frozen=True)
class Catalogue:
    """All operators and variants that were loaded; it does not change after ``load``."""

    operators: Mapping[str, Operator]
    variants: Mapping[str, Variant]

    def operator(self, name: str) -> Operator:
        """The operator of that name, or ``UnknownNameError`` with the nearest one."""
        if name not in self.operators:
            raise unknown("operator", name, self.operators)
        return self.operators[name]

    def variant(self, key: str) -> Variant:
        """The variant ``operator/name``, or ``UnknownNameError`` with the nearest one."""
        if key not in self.variants:
            name, _, variant = key.partition("/")
            if name in self.operators and variant:
                raise unknown(f"variant of {name}", variant, (v.name for v in self.of(name)))
            raise unknown("variant", key, self.variants)
        return self.variants[key]

    def of(self, operator: str) -> tuple[Variant, ...]:
        """Every variant of an operator, the reference first."""
        reference = self.operator(operator).reference
        found = [v for v in self.variants.values() if v.operator == operator]
        return tuple(sorted(found, key=lambda v: (v.name != reference, v.name)))

    def select(self, operator: str = "*", variant: str = "*") -> tuple[Variant, ...]:
        """Variants whose operator and name match the globs; nothing found is an ``UnknownNameError``."""
        operators = fnmatch.filter(self.operators, operator)
        if not operators:
            raise unknown("operator", operator, self.operators)
        found = [v for name in operators for v in self.of(name) if fnmatch.fnmatchcase(v.name, variant)]
        if not found:
            raise unknown("variant", variant, {v.name for name in operators for v in self.of(name)})
        return tuple(found)

    def bind(self, key: str, **options: Any) -> Bound:
        """The callable of ``operator/name`` behind its contract, whether proven or not; options override defaults."""
        variant = self.variant(key)
        for name, value in options.items():
            if name not in variant.options:
                raise unknown(f"option of {key}", name, variant.options)
            option = variant.options[name]
            if not option.low <= value <= option.high:
                raise ValueError(f"{key}: {name}={value} lies outside the proven range {option.low}..{option.high}")
        return Bound(self.operators[variant.operator], variant, {**variant.defaults(), **options})

    def reference(self, operator: str) -> Bound:
        """The operator's reference, bound."""
        return self.bind(f"{operator}/{self.operator(operator).reference}")


def load(packages: Iterable[str] | None = None, plugins: Iterable[str | Path] = ()) -> Catalogue:
    """Import the packages' modules and the plug-in files and collect what they declare.

    Without ``packages`` those of ``[tool.registry]`` in pyproject.toml. Raises ``ValueError`` for duplicates,
    signatures that differ from the operator's and missing references.
    """
    modules = [
        module for package in (settings().packages if packages is None else packages) for module in _modules(package)
    ]
    modules += [load_file(Path(path)) for path in plugins]
    operators: dict[str, Operator] = {}
    variants: dict[str, Variant] = {}
    for module in modules:
        for declaration in declared(module):
            target: dict[str, Any] = operators if isinstance(declaration, Operator) else variants
            key = declaration.name if isinstance(declaration, Operator) else declaration.key
            if key in target:
                raise ValueError(f"{key} is declared twice, the second time in {module.__name__}")
            target[key] = declaration
    for variant in variants.values():
        check_signature(operators, variant)
    for operator in operators.values():
        if f"{operator.name}/{operator.reference}" not in variants:
            raise ValueError(f"operator {operator.name}: its reference {operator.reference!r} is not declared")
    return Catalogue(operators=operators, variants=variants)


def declared(module: ModuleType) -> list[Operator | Variant]:
    """The declarations attached to functions that the module itself defines, in order of definition."""
    found = []
    for value in vars(module).values():
        declaration = vars(value).get(ATTRIBUTE) if inspect.isfunction(value) else None
        if isinstance(declaration, (Operator, Variant)) and value.__module__ == module.__name__:
            found.append(declaration)
    return found


def parameters_of(operator: Operator) -> tuple[str, ...]:
    """The argument names of the operator's fixed signature."""
    return tuple(inspect.signature(operator.contract).parameters)[1:]


def check_signature(operators: Mapping[str, Operator], variant: Variant) -> None:
    """``ValueError`` unless the variant takes its operator's arguments and its options and claims known conditions."""
    if variant.operator not in operators:
        raise unknown(f"operator for variant {variant.name!r}:", variant.operator, operators)
    operator = operators[variant.operator]
    expected = parameters_of(operator)
    parameters = inspect.signature(variant.function).parameters
    positional = tuple(n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    keyword = {n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    if (positional[: len(expected)] != expected and not variadic) or set(positional[len(expected) :]) | keyword != set(
        variant.options
    ):
        raise ValueError(
            f"{variant.key} takes ({', '.join(parameters)}); "
            f"{variant.operator} is ({', '.join(expected)}) and its options {sorted(variant.options)} are keyword-only"
        )
    for name in variant.conditions:
        if name not in operator.conditions:
            raise unknown(f"condition of {variant.operator}", name, operator.conditions)


def _modules(package: str) -> list[ModuleType]:
    root = importlib.import_module(package)
    if not hasattr(root, "__path__"):
        return [root]
    names = sorted(info.name for info in pkgutil.iter_modules(root.__path__, prefix=f"{package}."))
    return [importlib.import_module(name) for name in names]


def load_file(path: Path) -> ModuleType:
    """Import a plug-in file under its stem; ``ValueError`` when it is missing or does not import."""
    if not path.is_file():
        raise ValueError(f"no plug-in file {path}")
    name = f"plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
