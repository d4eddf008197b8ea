"""What an operator and a variant declare: frozen descriptions that decorators attach and ``load`` collects.

The decorators have no side effect: they put a declaration on the function and return the function itself.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

ATTRIBUTE = "__registry__"
DTYPES = ("float32", "float64", "bfloat16_autocast")
PROPERTIES = (
    "forward",
    "gradient",
    "carry",
    "causality",
    "determinism",
    "purity",
    "layout",
    "totality",
    "poison",
    "autocast",
    "memory",
    "distribution",
    "identity",
)

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """An error budget against a float64 oracle.

    Per slice: ``max|variant - oracle| <= k * max|reference - oracle| + c * eps * max|oracle|``, and the same
    for the root mean square. ``reason`` says in words why k and c are what they are. ``exact`` asks for
    equality to the bit. For outputs named in ``grows`` c is multiplied by the square root of the tokens
    absorbed. ``cancelling`` gives outputs and gradients (``d<input>`` globs) whose terms cancel a c of their own.
    """

    k: float
    c: float
    reason: str
    exact: bool = False
    grows: tuple[str, ...] = ()
    cancelling: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.k < 0 or self.c < 0:
            raise ValueError(f"a tolerance needs k >= 0 and c >= 0, not k={self.k}, c={self.c}")
        if not self.reason.strip():
            raise ValueError("a tolerance needs its reason in words")

    def widening(self, name: str) -> float:
        """The factor on c for an output, or a gradient ``d<input>``."""
        own = next((c for pattern, c in self.cancelling.items() if fnmatch.fnmatchcase(name, pattern)), self.c)
        return own / self.c if self.c else 1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One named set of sizes and values; its inputs are a pure function of (case, seed, dtype, device).

    ``kind`` is small, ragged, edge, extreme or real; ``values`` names how the operator's ``draw`` fills the
    tensors; sizes are by letter (G, C, K, ...).
    """

    name: str
    kind: str
    sizes: Mapping[str, int]
    values: str = "normal"

    def __post_init__(self) -> None:
        if self.kind not in ("small", "ragged", "edge", "extreme", "real"):
            raise ValueError(f"case {self.name!r}: kind {self.kind!r} is not small, ragged, edge, extreme or real")

    def resized(self, **sizes: int) -> Case:
        """The same case at other sizes, named after them."""
        label = ",".join(f"{key}={value}" for key, value in sizes.items())
        return Case(name=f"{self.name}[{label}]", kind="ragged", sizes={**self.sizes, **sizes}, values=self.values)


@dataclass(frozen=True, kw_only=True)
class Option:
    """A variant's keyword with its default and the range it is proven for (at both ends and the default)."""

    default: int
    low: int
    high: int

    def __post_init__(self) -> None:
        if not self.low <= self.default <= self.high:
            raise ValueError(f"option default {self.default} lies outside its range {self.low}..{self.high}")


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A named operation: its contract, reference, cases and the properties every variant of it must have.

    ``contract(arithmetic, *arguments)`` checks shapes and dtypes, expands defaults and calls the arithmetic.
    Input leaves are named by argument (``q``, ``carry.0``, ``parameters.attn.w_qkv``), output leaves by
    ``outputs`` in flattened order.
    """

    name: str
    reference: str
    contract: Callable[..., Any]
    cases: Callable[[], tuple[Case, ...]]
    draw: Callable[[Case, Any, Any], dict[str, Any]]
    outputs: tuple[str, ...]
    properties: tuple[str, ...]
    tolerance: Tolerance
    differentiable: tuple[str, ...] = ()
    carry: tuple[tuple[str, str], ...] = ()
    time: Mapping[str, int] = field(default_factory=dict)
    slices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    circular: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    conditions: Mapping[str, Callable[..., str | None]] = field(default_factory=dict)
    margin: Callable[..., float] | None = None
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    probabilities: Callable[..., Any] | None = None
    summary: str = ""

    def __post_init__(self) -> None:
        unknown = [name for name in self.properties if name not in PROPERTIES]
        if unknown:
            raise ValueError(f"operator {self.name!r}: unknown properties {unknown}; known: {', '.join(PROPERTIES)}")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One implementation of an operator, with the domain it claims and what it needs."""

    operator: str
    name: str
    function: Callable[..., Any]
    prepare: Callable[..., Any] | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = DTYPES
    shapes: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    grad: bool = True
    single_backward: bool = False
    requires: tuple[str, ...] = ()
    determinism: str = "bitwise"
    memory_bound: Callable[..., int] | None = None
    falls_back: Callable[..., bool] | None = None
    compiled: bool = False
    summary: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.name) or not re.fullmatch(r"[A-Za-z0-9_.-]+", self.operator):
            raise ValueError(
                f"variant {self.operator}/{self.name}: names are made of letters, digits, '_', '-' and '.'"
            )
        if self.determinism not in ("bitwise", "tolerance"):
            raise ValueError(
                f"variant {self.operator}/{self.name}: determinism {self.determinism!r} is not bitwise or tolerance"
            )
        unknown = [dtype for dtype in self.dtypes if dtype not in DTYPES]
        if unknown:
            raise ValueError(
                f"variant {self.operator}/{self.name}: unknown dtypes {unknown}; known: {', '.join(DTYPES)}"
            )

    @property
    def key(self) -> str:
        """``operator/name``."""
        return f"{self.operator}/{self.name}"

    def defaults(self) -> dict[str, int]:
        """Every option at its default."""
        return {name: option.default for name, option in self.options.items()}

    def option_sets(self) -> tuple[dict[str, int], ...]:
        """What is proven: the defaults, then each option at either end, the others at their default."""
        sets = [self.defaults()]
        for name, option in self.options.items():
            for value in (option.low, option.high):
                candidate = {**self.defaults(), name: value}
                if candidate not in sets:
                    sets.append(candidate)
        return tuple(sets)


def operator(**declaration: Any) -> Callable[[Function], Function]:
    """Declare the decorated contract function as an operator; the arguments are ``Operator``'s fields."""

    def attach(contract: Function) -> Function:
        setattr(contract, ATTRIBUTE, Operator(contract=contract, **{"summary": _summary(contract), **declaration}))
        return contract

    return attach


def variant(**declaration: Any) -> Callable[[Function], Function]:
    """Declare the decorated function as a variant; ``operator`` and ``name`` are needed, the rest has defaults.

    The arguments are ``Variant``'s fields: ``prepare`` (run once on the fixed input), ``options``
    (name -> ``Option``), the claimed domain (``devices``, ``dtypes``, ``shapes`` as letter -> (low, high,
    multiple), the operator's ``conditions`` by name, ``grad``, ``single_backward``), ``requires``
    (requirement strings), ``determinism``, ``memory_bound(sizes, itemsize) -> bytes``,
    ``falls_back(*arguments) -> bool`` (where it may call the reference), ``compiled`` and ``summary``.
    """

    def attach(function: Function) -> Function:
        setattr(function, ATTRIBUTE, Variant(function=function, **{"summary": _summary(function), **declaration}))
        return function

    return attach


def _summary(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().split("\n")[0]
