"""Fingerprints and enumeration from source text: what a definition reaches by name, without importing anything."""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import symtable
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from registry.settings import ROOT

DECORATORS = {"registry.declare:variant", "registry.declare:operator"}
_SKIPPED_FIELDS = {"type_comment", "type_ignores", "kind", "ctx"}


def canonical(node: object) -> str:
    """A dump of a syntax tree without positions, comments and docstrings, the same on Python 3.11 to 3.13."""
    if isinstance(node, ast.AST):
        fields = []
        for name in node._fields:
            value = getattr(node, name, None)
            if name in _SKIPPED_FIELDS or value is None or value == []:
                continue
            if name == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
                value = _without_docstring(value)
            fields.append(f"{name}={canonical(value)}")
        if isinstance(node, ast.Constant):
            return f"Constant({type(node.value).__name__}:{node.value!r})"
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, (list, tuple)):
        return f"[{','.join(canonical(item) for item in node)}]"
    return repr(node)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body


def digest(text: str) -> str:
    """Twelve hex digits of SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class ModuleSource:
    """One parsed module: the statements that bind or change each of its top-level names."""

    name: str
    path: Path
    tree: ast.Module
    bindings: dict[str, list[ast.stmt]]
    stars: tuple[str, ...]
    globals_of: dict[tuple[str, int], frozenset[str]] = field(repr=False)

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def parse(name: str, path: Path) -> ModuleSource:
    """Read and parse one file; ``ValueError`` when it is not Python."""
    text = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(text, filename=str(path))
        table = symtable.symtable(text, str(path), "exec")
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from error
    bindings: dict[str, list[ast.stmt]] = {}
    stars = []
    for statement in tree.body:
        for bound in _bound_names(statement):
            bindings.setdefault(bound, []).append(statement)
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
            stars.append(_absolute(statement, name if path.name == "__init__.py" else name.rpartition(".")[0]))
    return ModuleSource(name, path, tree, bindings, tuple(stars), dict(_scope_globals(table)))


def _scope_globals(table: symtable.SymbolTable) -> Iterator[tuple[tuple[str, int], frozenset[str]]]:
    for child in table.get_children():
        yield (child.get_name(), child.get_lineno()), frozenset(_globals_below(child))
        if child.get_type() == "type parameters":
            yield from _scope_globals(child)


def _globals_below(table: symtable.SymbolTable) -> set[str]:
    found = {s.get_name() for s in table.get_symbols() if s.is_global()}
    for child in table.get_children():
        found |= _globals_below(child)
    return found


def _bound_names(statement: ast.stmt) -> set[str]:
    """Names a top-level statement binds, or whose object it may change."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, ast.Import):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    if isinstance(statement, ast.Expr):
        if isinstance(statement.value, ast.Constant):
            return set()
        return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    found: set[str] = set()
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.stmt):
            found |= _bound_names(child)
        elif isinstance(child, ast.ExceptHandler):
            for inner in child.body:
                found |= _bound_names(inner)
    return found | {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    if not statement.level:
        return statement.module or ""
    base = package.split(".")[: len(package.split(".")) - statement.level + 1]
    return ".".join([*base, *([statement.module] if statement.module else [])])


class Sources:
    """The source files below a checkout's root and named plug-in files, parsed once."""

    def __init__(self, root: Path = ROOT, files: dict[str, Path] | None = None) -> None:
        self.root = root
        self.files = dict(files or {})
        self._modules: dict[str, ModuleSource | None] = {}
        self._closures: dict[tuple[str, str], dict[str, str]] = {}

    def module(self, name: str) -> ModuleSource | None:
        """The module of that dotted name, or None when it is not a source of this checkout."""
        if name not in self._modules:
            path = self._path(name)
            self._modules[name] = parse(name, path) if path is not None else None
        return self._modules[name]

    def _path(self, name: str) -> Path | None:
        if name in self.files:
            return self.files[name]
        base = self.root.joinpath(*name.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if name and path.is_file():
                return path
        return None

    def closure(self, module: str, name: str) -> dict[str, str]:
        """``{"module:name": digest}`` of every definition reachable by name from one; empty when it does not exist."""
        key = (module, name)
        if key not in self._closures:
            found: dict[str, str] = {}
            self._visit(module, name, found)
            self._closures[key] = found
        return self._closures[key]

    def closure_of(self, module: str, node: ast.AST) -> dict[str, str]:
        """The same for an expression of a module: the expression itself and all it reaches."""
        text = canonical(node)
        key = (module, text)
        if key not in self._closures:
            found = {f"{module}:<expression>": digest(text)}
            source = self.module(module)
            if source is not None:
                for chain in _chains(node):
                    self._follow(source, chain, found)
            self._closures[key] = found
        return self._closures[key]

    def _visit(self, module: str, name: str, found: dict[str, str], without: tuple[str, ...] = ()) -> None:
        source = self.module(module)
        label = f"{module}:{name}"
        if source is None or label in found:
            return
        statements = source.bindings.get(name)
        if statements is None:
            for star in source.stars:
                if self._resolves(star, name):
                    self._visit(star, name, found)
            return
        found[label] = digest("".join(canonical(_pruned(s, without)) for s in statements))
        for statement in statements:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                self._visit_import(source, statement, name, found)
            else:
                for chain in self._references(source, _pruned(statement, without)):
                    self._follow(source, chain, found)

    def contract(self, module: str, name: str, without: tuple[str, ...]) -> dict[str, str]:
        """The closure of a decorated definition, less the named keywords of its decorators."""
        key = (module, f"{name} less {','.join(without)}")
        if key not in self._closures:
            found: dict[str, str] = {}
            self._visit(module, name, found, without)
            self._closures[key] = found
        return self._closures[key]

    def _visit_import(self, source: ModuleSource, statement: ast.stmt, name: str, found: dict[str, str]) -> None:
        target = self._import_target(source, statement, name)
        if target is not None and target[1]:
            self._visit(target[0], target[1], found)

    def _import_target(self, source: ModuleSource, statement: ast.stmt, name: str) -> tuple[str, str] | None:
        """What an imported name is: (module, definition), or (module, '') for a module itself."""
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    return (alias.name if alias.asname else name), ""
        if isinstance(statement, ast.ImportFrom):
            base = _absolute(statement, source.package)
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    if self._resolves(base, alias.name):
                        return base, alias.name
                    return (f"{base}.{alias.name}", "") if self.module(f"{base}.{alias.name}") else None
        return None

    def _resolves(self, module: str, name: str) -> bool:
        source = self.module(module)
        return source is not None and (
            name in source.bindings or any(self._resolves(star, name) for star in source.stars)
        )

    def _references(self, source: ModuleSource, statement: ast.stmt) -> Iterator[tuple[str, ...]]:
        """Attribute chains of global names that a statement uses; annotations do not count."""
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _chains(statement)
            return
        line = statement.lineno
        names = source.globals_of.get((statement.name, line))
        outside: list[ast.AST] = []
        for decorator in statement.decorator_list:
            callee = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(decorator, ast.Call) and self.definition(source, _chain(callee)) in DECORATORS:
                # A tolerance is a role of its own: who only calls the operator does not depend on it.
                outside += [keyword.value for keyword in decorator.keywords if keyword.arg != "tolerance"]
            else:
                outside.append(decorator)
        if isinstance(statement, ast.ClassDef):
            outside += [*statement.bases, *(k.value for k in statement.keywords)]
        else:
            arguments = statement.args
            outside += [default for default in (*arguments.defaults, *arguments.kw_defaults) if default is not None]
        for node in outside:
            yield from _chains(node)
        for inner in statement.body:
            for chain in _chains(inner):
                if names is None or chain[0] in names or isinstance(statement, ast.ClassDef):
                    yield chain

    def definition(self, source: ModuleSource, chain: tuple[str, ...]) -> str | None:
        """``module:name`` that an attribute chain of a module means, through imports and re-exports, if it is ours."""
        if not chain:
            return None
        module, rest = source.name, chain
        for _ in range(32):
            current = self.module(module)
            if current is None or not rest:
                return None
            statement = current.bindings.get(rest[0], [None])[-1]
            if statement is None:
                submodule = f"{module}.{rest[0]}"
                if self.module(submodule) is None:
                    return None
                module, rest = submodule, rest[1:]
                continue
            if not isinstance(statement, (ast.Import, ast.ImportFrom)):
                return f"{module}:{rest[0]}"
            target = self._import_target(current, statement, rest[0])
            if target is None:
                return None
            module, rest = target[0], ((target[1], *rest[1:]) if target[1] else rest[1:])
        return None

    def _follow(self, source: ModuleSource, chain: tuple[str, ...], found: dict[str, str]) -> None:
        """Add what a chain reaches: its own import statement, then the definition, or a whole module used bare."""
        statements = source.bindings.get(chain[0])
        if statements is None:
            if any(self._resolves(star, chain[0]) for star in source.stars):
                self._visit(source.name, chain[0], found)
            return
        if not isinstance(statements[-1], (ast.Import, ast.ImportFrom)):
            self._visit(source.name, chain[0], found)
            return
        found.setdefault(f"{source.name}:{chain[0]}", digest("".join(canonical(s) for s in statements)))
        target = self._import_target(source, statements[-1], chain[0])
        if target is None:
            return
        if target[1]:
            self._visit(*target, found)
            return
        module, rest = target[0], chain[1:]
        while rest and not self._resolves(module, rest[0]) and self.module(f"{module}.{rest[0]}"):
            module, rest = f"{module}.{rest[0]}", rest[1:]
        inner = self.module(module)
        if inner is None:
            return
        if rest:
            self._visit(module, rest[0], found)
        else:
            for name in inner.bindings:
                self._visit(module, name, found)


def _pruned(statement: ast.stmt, without: tuple[str, ...]) -> ast.stmt:
    if not without or not isinstance(statement, ast.FunctionDef):
        return statement
    decorators: list[ast.expr] = []
    for decorator in statement.decorator_list:
        if isinstance(decorator, ast.Call):
            kept = [k for k in decorator.keywords if k.arg not in without]
            decorators.append(ast.copy_location(ast.Call(decorator.func, decorator.args, kept), decorator))
        else:
            decorators.append(decorator)
    pruned = copy.copy(statement)
    pruned.decorator_list = decorators
    return pruned


def _chain(node: ast.AST) -> tuple[str, ...]:
    """``a.b.c`` as a tuple, empty when the root is not a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else ()


def _chains(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """Every maximal attribute chain below a node, annotations left out."""
    chain = _chain(node)
    if chain:
        yield chain
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _chains(child)


@functools.cache
def checkout() -> Sources:
    """The sources of this checkout, parsed as they are needed."""
    return Sources()
