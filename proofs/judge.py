"""The judge, in the parent: draws inputs, runs the reference in its own dtype and in float64, and keeps both.

Nothing of this is ever sent to the process that runs the variant, except the inputs.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Generic, Protocol, TypeVar

import torch

from proofs.budget import BLOCK_ELEMENTS, EPS, Truth, blocks
from registry import Bound, Case, Catalogue, Operator, leaves, map_leaves

Tree = dict[str, Any]
MARGIN = {"float32": 1e-4, "float64": 1e-9, "bfloat16_autocast": 5e-3}
CACHE_BYTES, DRAWN_BYTES, ENTRIES = 2 << 30, 1 << 29, 4096
_STAND_IN = EPS["float64"] / EPS["float32"]


@dataclass(frozen=True)
class Drawn:
    """One set of inputs: the case, the seed it was drawn from and the arguments by name (CPU)."""

    case: Case
    seed: int
    arguments: Tree
    redrawn: int = 0

    @property
    def where(self) -> str:
        """The case and seed in words."""
        return f"case {self.case.name} ({','.join(f'{k}={v}' for k, v in self.case.sizes.items())}), seed {self.seed}"

    def nbytes(self) -> int:
        """Bytes held, for the cache's limit; an expanded input counts once."""
        tensors = (leaf for _, leaf in leaves(self.arguments) if isinstance(leaf, torch.Tensor))
        return sum(t.untyped_storage().nbytes() for t in tensors if t.layout is torch.strided)


@dataclass(frozen=True)
class Expected:
    """What the outputs should be, and the gradients for each set of cotangents (None where there is none)."""

    outputs: dict[str, Truth]
    grads: list[dict[str, Truth | None]] = field(default_factory=list)
    differentiable: frozenset[str] = frozenset()

    def nbytes(self) -> int:
        """Bytes held, for the cache's limit."""
        truths = [*self.outputs.values(), *(t for g in self.grads for t in g.values() if t is not None)]
        return sum(t.oracle.nbytes + t.reference_error.nbytes for t in truths)


@dataclass(frozen=True)
class Raw:
    """What one run of the reference gave."""

    outputs: dict[str, torch.Tensor]
    grads: list[dict[str, torch.Tensor | None]]
    differentiable: frozenset[str]


# One list of cotangents a backward, or what makes them from the outputs.
Backwards = Sequence[list[torch.Tensor | None]]
Cotangents = Backwards | Callable[[Mapping[str, torch.Tensor]], Backwards]


class Judge:
    """Inputs and truths of one operator at one dtype and device; truths are kept for the next variant."""

    def __init__(self, catalogue: Catalogue, operator: str, dtype: str, device: str = "cpu") -> None:
        self.catalogue = catalogue
        self.operator: Operator = catalogue.operator(operator)
        self.reference: Bound = catalogue.reference(operator)
        self.dtype = dtype
        self.device = device
        self.eps = EPS[dtype]
        self.torch_dtype = torch.float64 if dtype == "float64" else torch.float32
        self._kept: _Kept[Expected] = _Kept(CACHE_BYTES)
        self._drawn: _Kept[Drawn] = _Kept(DRAWN_BYTES)

    def draw(self, case: Case, seed: int) -> Drawn:
        """Inputs of a case, kept for the next property and variant: they are read here, never written."""
        return self._drawn.get((*_identity(case), seed), lambda: self._draw(case, seed))

    def _draw(self, case: Case, seed: int) -> Drawn:
        """Drawn again while a discrete decision lies within the dtype's noise."""
        for attempt in range(200):
            text = f"{self.operator.name}|{case.name}|{case.values}|{sorted(case.sizes.items())}|{seed}|{attempt}"
            generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))
            arguments = self.operator.draw(case, generator, self.torch_dtype)
            if self.operator.margin is None or self.operator.margin(*upcast(arguments).values()) > MARGIN[self.dtype]:
                return Drawn(case, seed, arguments, attempt)
        raise AssertionError(f"{self.operator.name}: case {case.name} has no draw away from a discontinuity")

    def cotangents(self, drawn: Drawn, index: int = 0, uniform: bool = False) -> list[torch.Tensor | None]:
        """Random non-uniform cotangents for every floating output; ``uniform`` gives one expanded value (stride 0)."""
        return _cotangents(self.shapes(drawn), drawn.seed, index, uniform)

    def shapes(self, drawn: Drawn) -> dict[str, torch.Tensor]:
        """The outputs' shapes and dtypes on these inputs, as tensors (from the reference's own run)."""
        return {name: truth.oracle.to(truth.dtypes[0]) for name, truth in self.expected(drawn).outputs.items()}

    def differentiable(self, arguments: Tree) -> list[str]:
        """Leaf names of the inputs that a gradient is asked for."""
        names = [
            name for name, leaf in leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
        ]
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in self.operator.differentiable)]

    def expected(
        self,
        drawn: Drawn,
        cotangents: Sequence[list[torch.Tensor | None]] = (),
        key: Any = None,
        grad: Sequence[str] | None = None,
    ) -> Expected:
        """The truth for these inputs; kept under (case, seed, key), where key names the cotangents."""
        inputs = tuple(self.differentiable(drawn.arguments) if grad is None else grad)
        wanted = inputs if cotangents else ()
        if key is None and cotangents:
            return self.compute(drawn.arguments, cotangents, wanted)
        making: Cotangents = cotangents
        if drawn.case.kind == "real" and self.dtype == "float32" and not cotangents and inputs:
            # The 1B shape is run once, forward and gradient: whoever asks first pays for both.
            key, wanted = "random", inputs

            def making(outputs: Mapping[str, torch.Tensor]) -> list[list[torch.Tensor | None]]:
                # The oracle's outputs are float64, the cotangents those that the variant gets.
                return [_cotangents(outputs, drawn.seed, dtype=self.torch_dtype)]

        name = (*_identity(drawn.case), drawn.seed, key, wanted)
        return self._kept.get(name, lambda: self.compute(drawn.arguments, making, wanted))

    def compute(self, arguments: Tree, cotangents: Cotangents = (), wanted: Sequence[str] = ()) -> Expected:
        """Run reference and oracle; in float64, where they coincide, the float32 error scaled by eps stands in."""
        if self.dtype == "float64":
            assert not callable(cotangents)
            oracle = self.run(arguments, cotangents, wanted, torch.float64)
            low = map_leaves(_to(torch.float32), arguments)
            low_cotangents = [[None if c is None else c.float() for c in each] for each in cotangents]
            reference = self.run(low, low_cotangents, wanted, torch.float32)
            truth = self.run(upcast(low), low_cotangents, wanted, torch.float64)
            return _expected(oracle, _errors(reference, truth), _STAND_IN, lambda t: (t.dtype,))
        reference = self.run(arguments, cotangents, wanted, self.torch_dtype)
        oracle = self.run(upcast(arguments), cotangents, wanted, torch.float64)
        autocast = self.dtype == "bfloat16_autocast"

        def dtypes(tensor: torch.Tensor) -> tuple[torch.dtype, ...]:
            floating = tensor.dtype.is_floating_point
            return (
                tuple({tensor.dtype: 1, torch.float32: 1, torch.bfloat16: 1})
                if autocast and floating
                else (tensor.dtype,)
            )

        found = _expected(oracle, _errors(reference, oracle), 1.0, lambda t: (t.dtype,))
        forms = {name: dtypes(reference.outputs[name]) for name in found.outputs}

        def grad_form(truth: Truth | None) -> Truth | None:
            return None if truth is None else Truth(truth.oracle, truth.reference_error, (self.torch_dtype,))

        return Expected(
            {n: Truth(t.oracle, t.reference_error, forms[n]) for n, t in found.outputs.items()},
            [{n: grad_form(t) for n, t in grads.items()} for grads in found.grads],
            found.differentiable,
        )

    def run(
        self,
        arguments: Tree,
        cotangents: Cotangents,
        wanted: Sequence[str],
        dtype: torch.dtype,
    ) -> Raw:
        """One run of the reference on a copy of the arguments."""
        tracked: dict[str, torch.Tensor] = {}

        def copy(name: str, leaf: Any) -> Any:
            copied = _copy(leaf)
            if name in wanted:
                tracked[name] = copied.requires_grad_()
            return copied

        values = list(map_leaves(copy, arguments).values())
        if self.reference.variant.prepare is not None:
            values[0] = self.reference.prepare(values[0])
        with self._context(dtype):
            outputs = self.reference(*values)
        named = self.name_outputs([leaf for _, leaf in leaves(outputs)], values)
        backwards = cotangents(named) if callable(cotangents) else cotangents
        grads = [
            self._gradient(list(named.values()), each, tracked, last=index + 1 == len(backwards))
            for index, each in enumerate(backwards)
        ]
        differentiable = frozenset(name for name, leaf in named.items() if leaf.requires_grad)
        return Raw({name: leaf.detach() for name, leaf in named.items()}, grads, differentiable)

    def _context(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        if self.dtype == "bfloat16_autocast" and dtype is torch.float32:
            return torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16)
        return nullcontext()

    def name_outputs(self, flat: Sequence[Any], values: Sequence[Any]) -> dict[str, Any]:
        """Outputs by name; what the operator mutates counts as an output too."""
        named = dict(zip(self.operator.outputs, flat, strict=False))
        names = list(self.argument_names())
        for mutated in self.operator.mutates:
            for name, leaf in leaves(values[names.index(mutated)], mutated):
                named[name] = leaf
        return named

    def argument_names(self) -> tuple[str, ...]:
        """The operator's arguments in order."""
        code = self.operator.contract.__code__
        return code.co_varnames[1 : code.co_argcount]

    @staticmethod
    def _gradient(
        outputs: list[torch.Tensor],
        cotangents: list[torch.Tensor | None],
        tracked: Mapping[str, torch.Tensor],
        last: bool,
    ) -> dict[str, torch.Tensor | None]:
        pairs = [
            (o, c.to(o.dtype))
            for o, c in zip(outputs, cotangents, strict=False)
            if c is not None and isinstance(o, torch.Tensor) and o.requires_grad
        ]
        if not pairs or not tracked:
            return dict.fromkeys(tracked)
        results = torch.autograd.grad(
            [p[0] for p in pairs],
            list(tracked.values()),
            [p[1] for p in pairs],
            retain_graph=not last,
            allow_unused=True,
        )
        return dict(zip(tracked, results, strict=True))


def upcast(arguments: Tree) -> Tree:
    """The same values in float64."""
    raised: Tree = map_leaves(_to(torch.float64), arguments)
    return raised


def _to(dtype: torch.dtype) -> Any:
    def convert(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dtype.is_floating_point:
            return leaf
        converted = leaf.detach().to(dtype)
        if leaf.is_leaf and leaf.grad is not None:
            converted.grad = leaf.grad.to(dtype)
        return converted

    return convert


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        # An expanded input stays expanded: a contract may depend on stride 0.
        copied = leaf.detach() if 0 in leaf.stride() and leaf.layout is torch.strided else leaf.detach().clone()
        if leaf.is_leaf and leaf.grad is not None:
            copied.grad = leaf.grad.clone()
        return copied
    if isinstance(leaf, torch.Generator):
        other = torch.Generator(device=leaf.device)
        other.set_state(leaf.get_state())
        return other
    return leaf


def _error(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """``|low - high|``, block by block and in float32 where the tensor is large."""
    if not high.dtype.is_floating_point:
        return torch.zeros(())
    low, high = _dense(low), _dense(high)
    if high.numel() <= BLOCK_ELEMENTS:
        return torch.nan_to_num((low.double() - high).abs(), nan=0.0, posinf=0.0)
    found = torch.empty(high.shape, dtype=torch.float32)
    for rows in blocks(high):
        found[rows] = torch.nan_to_num((low[rows].double() - high[rows]).abs(), nan=0.0, posinf=0.0)
    return found


def _errors(reference: Raw, oracle: Raw) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor | None]]]:
    outputs = {name: _error(reference.outputs[name], value) for name, value in oracle.outputs.items()}
    grads = [
        {name: None if value is None or low[name] is None else _error(low[name], value) for name, value in high.items()}  # type: ignore[arg-type]
        for low, high in zip(reference.grads, oracle.grads, strict=True)
    ]
    return outputs, grads


def _expected(
    oracle: Raw, errors: tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor | None]]], scale: float, dtypes: Any
) -> Expected:
    outputs = {
        name: Truth(_dense(value), errors[0][name] * scale, dtypes(value)) for name, value in oracle.outputs.items()
    }
    grads: list[dict[str, Truth | None]] = []
    for values, own in zip(oracle.grads, errors[1], strict=True):
        row: dict[str, Truth | None] = {}
        for name, value in values.items():
            error = own[name]
            row[name] = None if value is None or error is None else Truth(_dense(value), error * scale, dtypes(value))
        grads.append(row)
    return Expected(outputs, grads, oracle.differentiable)


def _cotangents(
    outputs: Mapping[str, torch.Tensor],
    seed: int,
    index: int = 0,
    uniform: bool = False,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(7919 * (seed + 1) + index)
    found: list[torch.Tensor | None] = []
    for output in outputs.values():
        if not output.dtype.is_floating_point:
            found.append(None)
            continue
        wanted = output.dtype if dtype is None else dtype
        if uniform:
            value = torch.rand((), generator=generator, dtype=torch.float64).add(0.3)
            found.append(value.to(wanted).expand(output.shape))
        else:
            values = torch.randn(output.shape, generator=generator, dtype=torch.float64).add(0.4)
            found.append(values.to(wanted))
    return found


def _identity(case: Case) -> tuple[Hashable, ...]:
    return (case.name, case.values, tuple(sorted(case.sizes.items())))


class _Sized(Protocol):
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=_Sized)


class _Kept(Generic[S]):
    """Values by key; the longest unused go when together they hold more than the limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        self.values: OrderedDict[Hashable, tuple[S, int]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], S]) -> S:
        """The value under a key, made when missing."""
        if key not in self.values:
            value = make()
            # Counted once: a long chain draws thousands, and a sum over all of them at each would be quadratic.
            self.values[key] = (value, value.nbytes())
            self.held_bytes += self.values[key][1]
            while len(self.values) > 1 and (self.held_bytes > self.limit_bytes or len(self.values) > ENTRIES):
                self.held_bytes -= self.values.popitem(last=False)[1][1]
        self.values.move_to_end(key)
        return self.values[key][0]


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor
