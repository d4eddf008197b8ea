"""Workloads of a whole engine: training steps of a recipe, and the parts that a step is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.spec import Cell
from benchmarks.work import precision, recipe_operators
from fractus.continuous_engine import ContinuousThoughtEngine
from fractus.core import attention_layer, below, clock
from registry import Bound, Catalogue

LB_COEF, LR, MOMENTUM, MAX_NORM = 0.02, 7e-4, 0.9, 1.0
GATE_TEMPERATURE = 2.5
Batch = tuple[Tensor, Tensor]


class EngineWork:
    """Training steps, teacher-forced, with clip and update: ``call`` is one step on tokens that come once."""

    def __init__(self, catalogue: Catalogue, cell: Cell) -> None:
        assert cell.recipe is not None
        self.cell = cell
        self.operators: Mapping[str, Bound] = recipe_operators(catalogue, cell.recipe)
        self.start(cell.seed)

    def start(self, seed: int) -> None:
        """Fresh weights under a seed, away from the body's discontinuities, zero momentum and carry."""
        self.engine: Any = None  # frees the former one before the next is made
        self.momentum: list[Tensor] = []
        torch.manual_seed(seed)
        engine: Any = ContinuousThoughtEngine(**self.cell.extras["sizes"])
        _leave_the_wrap(engine, torch.Generator().manual_seed(seed))
        engine.to(self.cell.device, torch.float64 if self.cell.dtype == "float64" else torch.float32)
        engine.use(self.operators)
        for block in engine.blocks:
            block.moe.temperature = GATE_TEMPERATURE
        engine.reset_thought(self.cell.axes["B"])
        self.engine = engine
        self.parameters: list[Tensor] = list(engine.parameters())
        self.momentum = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]

    def item(self, index: int) -> Batch:
        """Random tokens and their targets (B,C); another index, other ones."""
        generator = torch.Generator().manual_seed(self.cell.seed + 104729 * (index + 1))
        B, C = self.cell.axes["B"], self.cell.axes["C"]
        tokens = torch.randint(self.cell.extras["sizes"]["vocab_size"], (B, C + 1), generator=generator)
        return tokens[:, :-1].to(self.cell.device), tokens[:, 1:].to(self.cell.device)

    def item_bytes(self) -> int:
        """Bytes of one batch."""
        return 16 * self.cell.axes["B"] * self.cell.axes["C"]

    def forward(self, item: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy and load-balance loss, in the graph."""
        with precision(self.cell):
            ce, lb = self.engine.tick_chunk_train_ce(*item)
        return ce, lb

    def update(self) -> Tensor:
        """Clip and step; gradients are forgotten."""
        norm: Tensor = self.operators["optimizer_step"](*self.trainable(), LR, MOMENTUM, MAX_NORM)
        self.forget()
        return norm

    def trainable(self) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters and their momentum."""
        return self.parameters, self.momentum

    def forget(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def call(self, item: Batch) -> tuple[float, float, float]:
        """One step: forward, backward, clip and update."""
        ce, lb = self.forward(item)
        (ce + LB_COEF * lb).backward()  # type: ignore[no-untyped-call]
        norm = self.update()
        return float(ce.detach()), float(lb.detach()), float(norm)

    def check(self, seed: int) -> dict[str, Tensor]:
        """Losses and gradient norms of the first steps from fresh weights that were never timed."""
        self.start(seed)
        rows = [self.call(self.item(seed + step)) for step in range(self.cell.extras.get("check_steps", 2))]
        return {"ce, lb, grad_norm": torch.tensor(rows, dtype=torch.float64)}

    def memory_call(self) -> Callable[[], Any]:
        """One step, for the untimed region in which memory is measured."""
        item = self.item(1_000_000)
        return lambda: self.call(item)

    def close(self) -> None:
        """Nothing to end."""


def _leave_the_wrap(engine: Any, generator: torch.Generator) -> None:
    """Gains and biases away from 1 and 0: a fresh norm leaves the clock's start phases at their wrap, by rounding."""
    with torch.no_grad():
        for block in engine.blocks:
            for name in ("norm_attn", "norm_moe", "norm_kur"):
                norm = getattr(block, name)
                norm.weight.add_(0.05 * torch.randn(norm.weight.shape, generator=generator))
                noise = 0.1 * torch.randn(norm.bias.shape, generator=generator)
                norm.bias.add_(noise)
            centre = 0.5 / block.kuramoto.omega.shape[0]
            block.norm_kur.bias.add_(centre - block.norm_kur.bias.mean())


class PartWork(EngineWork):
    """One part of a step alone, on the same engine; what comes before it is done outside the timed region."""

    def __init__(self, catalogue: Catalogue, cell: Cell) -> None:
        super().__init__(catalogue, cell)
        self.part = cell.operator
        if self.part not in PARTS:
            raise ValueError(f"no part {self.part!r}; there are: {', '.join(PARTS)}")

    def item(self, index: int) -> Any:
        """What the part needs: tokens, losses with their graph, gradients, or a hidden state."""
        tokens = super().item(index)
        if self.part == "forward":
            return tokens
        if self.part == "backward":
            self.forget()
            ce, lb = self.forward(tokens)
            return ce + LB_COEF * lb
        if self.part in ("clip", "optimizer_step"):
            self._gradients(index)
            return None
        shape = (*tokens[0].shape, self.cell.extras["sizes"]["d_model"])
        h = torch.randn(shape, generator=torch.Generator().manual_seed(index)).to(self.cell.device)
        return h, tokens

    def item_bytes(self) -> int:
        """So much that a batch is one item: graphs and gradients belong to one call."""
        return 1 << 40

    def _gradients(self, index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        for parameter in self.parameters:
            values = torch.randn((min(parameter.numel(), 4096),), generator=generator).to(parameter)
            parameter.grad = values.repeat(math.ceil(parameter.numel() / len(values)))[: parameter.numel()].view_as(
                parameter
            )

    def call(self, item: Any) -> Any:
        """The part."""
        return PARTS[self.part](self, item)

    def check(self, seed: int) -> dict[str, Tensor]:
        """Nothing: parts are judged with the engine that they make up."""
        return {}


def _backward(work: PartWork, loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _clip(work: PartWork, item: None) -> None:
    torch.nn.utils.clip_grad_norm_(work.parameters, MAX_NORM)


def _optimizer_step(work: PartWork, item: None) -> None:
    work.operators["optimizer_step"](*work.trainable(), LR, MOMENTUM, MAX_NORM)


def _attention(work: PartWork, item: tuple[Tensor, Batch]) -> None:
    h = item[0]
    for block in work.engine.blocks:
        operands = block.operands()
        B, H, K = h.shape[0], operands["n_heads"], h.shape[2] // operands["n_heads"]
        S, z = h.new_zeros(B, H, K, K), h.new_zeros(B, H, K)
        attention_layer(below(operands, "attn."), h, S, z, H, operands["n_levels"], operands["attention"])


def _kuramoto(work: PartWork, item: tuple[Tensor, Batch]) -> None:
    for block in work.engine.blocks:
        clock(block.operands(), item[0])


def _moe(work: PartWork, item: tuple[Tensor, Batch]) -> None:
    for block in work.engine.blocks:
        operands = block.operands()
        phases = item[0][:, -1:, : operands["kuramoto.omega"].shape[0]].contiguous()
        operands["moe"](item[0], phases, below(operands, "moe."), operands["top_k"], operands["concentration"])


def _embedding_norms(work: PartWork, item: tuple[Tensor, Batch]) -> None:
    h = work.engine.observe(item[1][0])
    for block in work.engine.blocks:
        for norm in (block.norm_attn, block.norm_kur, block.norm_moe):
            norm(h)


def _head(work: PartWork, item: tuple[Tensor, Batch]) -> None:
    hidden, (_, targets) = item
    work.operators["cross_entropy"](
        hidden.reshape(-1, hidden.shape[-1]), work.engine.observe.weight, targets.reshape(-1)
    )


# A step, then what its forward pass is made of.
PARTS: dict[str, Callable[[PartWork, Any], Any]] = {
    "forward": EngineWork.forward,
    "backward": _backward,
    "clip": _clip,
    "optimizer_step": _optimizer_step,
    "attention": _attention,
    "kuramoto": _kuramoto,
    "moe": _moe,
    "embedding_norms": _embedding_norms,
    "head": _head,
}
