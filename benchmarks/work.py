"""Workloads of single operators: what one call is, forward or with the backward pass through fresh cotangents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import inputs
from benchmarks.spec import Cell
from registry import Bound, Case, Catalogue, leaves, load_recipe
from registry.catalogue import parameters_of

Item = tuple[list[Any], dict[str, Tensor], list[Tensor | None]]


def as_case(cell: Cell) -> Case:
    """The operator's case that a cell's axes and values describe."""
    return Case(name=cell.case, kind="real", sizes=dict(cell.axes), values=cell.values)


def precision(cell: Cell) -> contextlib.AbstractContextManager[Any]:
    """Autocast where the cell's dtype says so."""
    if cell.dtype == "bfloat16_autocast":
        return torch.autocast(cell.device.partition(":")[0], dtype=torch.bfloat16)
    return contextlib.nullcontext()


def recipe_operators(catalogue: Catalogue, spec: str) -> dict[str, Bound]:
    """The callables of a recipe, proven or not; the parent has refused what is not."""
    recipe = load_recipe(spec)
    return {name: catalogue.bind(f"{name}/{v}", **recipe.options.get(name, {})) for name, v in recipe.variants.items()}


class OperatorWork:
    """One variant at one case: items vary two whole draws, so that no input comes twice."""

    def __init__(self, catalogue: Catalogue, cell: Cell) -> None:
        self.cell = cell
        self.bound = catalogue.bind(f"{cell.operator}/{cell.variant}", **cell.options)
        self.operator = self.bound.operator
        self.backward = cell.mode == "forward_backward"
        self.inner = recipe_operators(catalogue, cell.recipe) if cell.recipe else {}
        self.bases: list[inputs.Arguments] = []

    def draw(self, seed: int) -> inputs.Arguments:
        """A whole draw of the case, with the recipe's operators inside where the operator takes some."""
        arguments = inputs.drawn(self.operator, as_case(self.cell), seed, self.cell.dtype, self.cell.device)
        return inputs.with_operators(arguments, {k: v for k, v in self.inner.items() if k != self.operator.name})

    def item(self, index: int) -> Item:
        """Variation ``index`` of one of two base draws, ready to be called."""
        if not self.bases:
            self.bases = [self.draw(self.cell.seed + offset) for offset in range(2)]
        return self.prepared(inputs.varied(self.bases[index % 2], self.cell.seed + 7919 * (index + 1)), index)

    def item_bytes(self) -> int:
        """Bytes of an item's own tensors."""
        return inputs.size_bytes(self.item(0)[0], least=inputs.LARGE_BYTES)

    def prepared(self, arguments: inputs.Arguments, seed: int) -> Item:
        """Leaves that want a gradient, and cotangents for every output that has one."""
        if not self.backward:
            return list(arguments.values()), {}, []
        arguments, wanted = inputs.tracked(arguments, self.operator.differentiable)
        return list(arguments.values()), wanted, self._cotangents(seed)

    def _cotangents(self, seed: int) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(self.cell.seed + 15485863 * (seed + 1))
        return [None if s is None else torch.randn(s, generator=generator).to(self.cell.device) for s in self._shapes()]

    def _shapes(self) -> list[tuple[int, ...] | None]:
        """Shapes of the outputs that carry a gradient, found by one forward pass the first time."""
        if not hasattr(self, "_found"):
            arguments, _ = inputs.tracked(self.draw(self.cell.seed), self.operator.differentiable)
            with precision(self.cell):
                outputs = self.bound(*arguments.values())
            self._found = [
                tuple(o.shape) if isinstance(o, Tensor) and o.requires_grad else None for _, o in leaves(outputs)
            ]
        return self._found

    def call(self, item: Item) -> Any:
        """Outputs, and in ``forward_backward`` the gradients of every differentiable input."""
        arguments, wanted, cotangents = item
        if not self.backward:
            with torch.no_grad(), precision(self.cell):
                return self.bound(*arguments)
        with precision(self.cell):
            outputs = self.bound(*arguments)
        return outputs, self._gradients(outputs, wanted, cotangents)

    def _gradients(self, outputs: Any, wanted: dict[str, Tensor], cotangents: list[Tensor | None]) -> Any:
        pairs = [
            (leaf, cotangent.to(leaf.dtype))
            for (_, leaf), cotangent in zip(leaves(outputs), cotangents, strict=True)
            if cotangent is not None
        ]
        outs, grads = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return torch.autograd.grad(outs, list(wanted.values()), grads, allow_unused=True)

    def check(self, seed: int) -> dict[str, Tensor]:
        """Outputs, gradients and mutated inputs for a whole draw that was never timed, by name, on the CPU."""
        item = self.prepared(self.draw(seed), seed)
        result = self.call(item)
        outputs, grads = result if self.backward else (result, ())
        found = {name: leaf for name, (_, leaf) in zip(self.operator.outputs, leaves(outputs), strict=True)}
        found |= {f"grad {name}": leaf for name, leaf in zip(item[1], grads, strict=True)}
        names = parameters_of(self.operator)
        for name in self.operator.mutates:
            found |= {f"{name} {n}": leaf for n, leaf in leaves(item[0][names.index(name)])}
        return {name: leaf.detach().cpu() for name, leaf in found.items() if isinstance(leaf, Tensor)}

    def memory_call(self) -> Callable[[], Any]:
        """One call on fresh inputs, for the untimed region in which memory is measured."""
        item = self.item(1_000_000)
        return lambda: self.call(item)

    def close(self) -> None:
        """Nothing to end."""


def likelihood(operator_probabilities: Any, arguments: inputs.Arguments, tokens: Tensor) -> float:
    """Standard deviations by which the drawn tokens' log-likelihood lies off its expectation under the exact law."""
    p = operator_probabilities(*[v for v in arguments.values() if not isinstance(v, torch.Generator)])
    logs = torch.where(p > 0, p, 1.0).log()
    mean = (p * logs).sum(-1)
    spread = ((p * (logs - mean.unsqueeze(-1)) ** 2).sum()).sqrt()
    drawn = logs.gather(-1, tokens.cpu().unsqueeze(-1)).squeeze(-1)
    return float((drawn - mean).sum() / spread.clamp_min(1e-12))
