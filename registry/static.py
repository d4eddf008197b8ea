"""Operators and variants as their source text declares them, for tools that must not import torch."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.declare import DTYPES, PROPERTIES
from registry.settings import settings
from registry.source import Sources, checkout, digest


@dataclass(frozen=True, kw_only=True)
class StaticOperator:
    """What an operator's decorator says in literals, and where it stands."""

    name: str
    module: str
    function: str
    reference: str
    properties: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StaticVariant:
    """What a variant's decorator says in literals, and where it stands."""

    operator: str
    name: str
    module: str
    function: str
    options: Mapping[str, tuple[int, int, int]]
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    grad: bool
    requires: tuple[str, ...]
    claims_memory: bool
    summary: str

    @property
    def key(self) -> str:
        """``operator/name``."""
        return f"{self.operator}/{self.name}"

    def option_sets(self) -> tuple[dict[str, int], ...]:
        """The sets of options that are proven: defaults, then each option at either end."""
        defaults = {name: option[0] for name, option in self.options.items()}
        sets = [defaults]
        for name, (_, low, high) in self.options.items():
            for value in (low, high):
                candidate = {**defaults, name: value}
                if candidate not in sets:
                    sets.append(candidate)
        return tuple(sets)


@dataclass(frozen=True)
class StaticCatalogue:
    """The declarations of the checkout's operator packages, read from source text."""

    operators: Mapping[str, StaticOperator]
    variants: Mapping[str, StaticVariant]
    sources: Sources

    def required(self, variant: StaticVariant, dtype: str) -> tuple[str, ...]:
        """The properties a variant must have a proof of at a dtype, in DESIGN's order."""
        operator = self.operators[variant.operator]
        return required_properties(operator.properties, dtype, grad=variant.grad, memory=variant.claims_memory)

    def fingerprint(self, variant: StaticVariant, property_name: str) -> dict[str, Any]:
        """What a proof depends on, by role: digests of the definitions reached, and torch's version."""
        operator = self.operators[variant.operator]
        reference = self.variants[f"{operator.name}/{operator.reference}"]
        own = dict(self.sources.closure(variant.module, variant.function))
        for requirement in variant.requires:
            own[f"distribution:{requirement}"] = distribution_digest(requirement)
        return {
            "variant": dict(sorted(own.items())),
            "reference": _whole(self.sources.closure(reference.module, reference.function)),
            "operator": _whole(self.sources.contract(operator.module, operator.function, ("tolerance",))),
            "tolerance": _whole(self.sources.closure_of(operator.module, self._tolerance(operator))),
            "property": _whole(self.sources.closure(f"{settings().properties}.{property_name}", "check")),
            "torch": version("torch"),
        }

    def recipe_fingerprint(
        self, variants: Mapping[str, str], options: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The same for a whole recipe: its variants with their options, the engine, its tolerance and its proof."""
        own: dict[str, str] = {}
        references: dict[str, str] = {}
        for operator, name in sorted(variants.items()):
            variant = self.variants[f"{operator}/{name}"]
            chosen = "".join(f",{k}={v}" for k, v in sorted(options.get(operator, {}).items()))
            own[f"{variant.key}{chosen}"] = _whole(self.sources.closure(variant.module, variant.function))
            reference = self.variants[f"{operator}/{self.operators[operator].reference}"]
            references[operator] = _whole(self.sources.closure(reference.module, reference.function))
        place = settings()
        return {
            "variant": own,
            "reference": _whole(references),
            "operator": _whole(self.sources.closure(*_split(place.engine))),
            "tolerance": _whole(self.sources.closure(*_split(place.engine_tolerance))),
            "property": _whole(self.sources.closure(*_split(place.engine_proof))),
            "torch": version("torch"),
        }

    def _tolerance(self, operator: StaticOperator) -> ast.AST:
        source = self.sources.module(operator.module)
        assert source is not None
        for statement in source.bindings[operator.function]:
            for decorator in statement.decorator_list if isinstance(statement, ast.FunctionDef) else []:
                for keyword in decorator.keywords if isinstance(decorator, ast.Call) else []:
                    if keyword.arg == "tolerance":
                        return keyword.value
        raise ValueError(f"operator {operator.name} declares no tolerance")


def required_properties(properties: Iterable[str], dtype: str, *, grad: bool, memory: bool) -> tuple[str, ...]:
    """Which of an operator's properties a variant needs at a dtype: autocast has its own, memory only where claimed."""
    declared = set(properties)
    if dtype == "bfloat16_autocast":
        return ("autocast",) if "autocast" in declared else ()
    if not grad:
        declared.discard("gradient")
    if not memory:
        declared.discard("memory")
    declared.discard("autocast")
    return tuple(name for name in PROPERTIES if name in declared)


def _split(place: str) -> tuple[str, str]:
    module, _, name = place.partition(":")
    return module, name


def _whole(parts: Mapping[str, str]) -> str:
    return digest("\n".join(f"{name} {value}" for name, value in sorted(parts.items())))


def version(distribution: str) -> str:
    """The installed version of a distribution, or ``absent``."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def distribution_digest(requirement: str) -> str:
    """A third-party distribution's version and the digest of its RECORD, or ``absent``."""
    name = requirement.split(";")[0].strip()
    for separator in ("=", "<", ">", "!", "~", "[", " "):
        name = name.partition(separator)[0]
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
    return f"{found.version} {digest(found.read_text('RECORD') or '')}"


def enumerate_static(sources: Sources | None = None, packages: Iterable[str] | None = None) -> StaticCatalogue:
    """Read every module of the packages (and the sources' extra files) and collect what their decorators declare."""
    sources = checkout() if sources is None else sources
    operators: dict[str, StaticOperator] = {}
    variants: dict[str, StaticVariant] = {}
    for module in [*_module_names(sources.root, settings().packages if packages is None else packages), *sources.files]:
        source = sources.module(module)
        if source is None:
            continue
        for statement in source.tree.body:
            if not isinstance(statement, ast.FunctionDef):
                continue
            for decorator in statement.decorator_list:
                if not isinstance(decorator, ast.Call):
                    continue
                callee = sources.definition(source, _names(decorator.func))
                if callee == "registry.declare:operator":
                    operator = _operator(sources, module, statement, decorator)
                    operators[operator.name] = operator
                elif callee == "registry.declare:variant":
                    variant = _variant(sources, module, statement, decorator)
                    variants[variant.key] = variant
    return StaticCatalogue(operators, variants, sources)


def _module_names(root: Path, packages: Iterable[str]) -> list[str]:
    names = []
    for package in packages:
        folder = root.joinpath(*package.split("."))
        names += [f"{package}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    return names


def _names(node: ast.AST) -> tuple[str, ...]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else ()


def _literal(sources: Sources, module: str, node: ast.AST | None, default: Any) -> Any:
    """A keyword's value when it is a literal, an ``Option(...)``, a mapping of those or a module-level constant."""
    if node is None:
        return default
    if isinstance(node, ast.Call) and _names(node.func)[-1:] == ("Option",):
        values = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
        return values["default"], values["low"], values["high"]
    if isinstance(node, ast.Dict):
        return {
            ast.literal_eval(key): _literal(sources, module, value, None)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    if isinstance(node, ast.Name):
        source = sources.module(module)
        for statement in source.bindings.get(node.id, []) if source else []:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                return _literal(sources, module, statement.value, default)
        return default
    return ast.literal_eval(node)


def _operator(sources: Sources, module: str, statement: ast.FunctionDef, call: ast.Call) -> StaticOperator:
    keywords = {k.arg: k.value for k in call.keywords if k.arg}
    return StaticOperator(
        name=_literal(sources, module, keywords["name"], None),
        module=module,
        function=statement.name,
        reference=_literal(sources, module, keywords["reference"], None),
        properties=tuple(_literal(sources, module, keywords["properties"], ())),
    )


def _variant(sources: Sources, module: str, statement: ast.FunctionDef, call: ast.Call) -> StaticVariant:
    keywords = {k.arg: k.value for k in call.keywords if k.arg}

    def read(name: str, default: Any) -> Any:
        return _literal(sources, module, keywords.get(name), default)

    return StaticVariant(
        operator=read("operator", None),
        name=read("name", None),
        module=module,
        function=statement.name,
        options=read("options", {}),
        devices=tuple(read("devices", ("cpu", "cuda"))),
        dtypes=tuple(read("dtypes", DTYPES)),
        grad=read("grad", True),
        requires=tuple(read("requires", ())),
        claims_memory="memory_bound" in keywords,
        summary=read("summary", (ast.get_docstring(statement) or "").split("\n")[0]),
    )
