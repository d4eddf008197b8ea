"""One production training step: teacher-forced, then with probability SS_RATE scheduled sampling, an update each."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

SAMPLING_TEMPERATURE = 0.9
SS_LOSS_WEIGHT = 0.5
MOMENTUM = 0.9
MAX_NORM = 1.0


Carry: TypeAlias = Sequence[tuple[nn.Module, str, Tensor]]


class Engine(Protocol):
    """What the step needs of ``ContinuousThoughtEngine``."""

    output_head: Any

    def modules(self) -> Iterator[nn.Module]:
        """Every module, itself included."""

    def tick_chunk_train_ce(self, tokens: Tensor, targets: Tensor, return_hidden: bool = False) -> tuple[Tensor, ...]:
        """(tokens (B,C), targets (B,C)) -> (ce, total_lb[, hidden (B,C,D)])."""


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """The numbers of the training step."""

    lr: float
    ss_rate: float
    ss_prob: float
    lb_coef: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step: cross-entropies ``tf`` and ``ss`` (None without a sampling pass), ``grad_norm`` before clipping."""

    tf: float
    ss: float | None
    lb: float
    grad_norm: float


@dataclass(frozen=True)
class Partial:
    """What a step had done before its sampling pass failed: the teacher-forced result and the carry after it."""

    result: StepResult
    carry: Carry


class NonFiniteError(ArithmeticError):
    """A loss or gradient is not finite; the engine is left as before the step, or as after ``partial``."""

    def __init__(self, message: str, partial: Partial | None = None) -> None:
        super().__init__(message)
        self.partial = partial


@dataclass
class Stepper:
    """Steps on an engine with the recipe's sampler and optimizer step; ``momentum`` is kept by parameter name."""

    engine: Engine
    parameters: Mapping[str, torch.nn.Parameter]
    sampler: Callable[..., Tensor]
    optimizer_step: Callable[..., Any]
    hyper: Hyper
    device: torch.device
    autocast: bool = False
    momentum: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, parameter in self.parameters.items():
            self.momentum.setdefault(name, torch.zeros_like(parameter, requires_grad=False))

    def step(self, number: int, batches: Sequence[tuple[Tensor, Tensor]]) -> StepResult:
        """Step ``number`` on one batch, or on several accumulated into one update (a documented deviation)."""
        draws = [Draws(self.hyper, number, index, self.device) for index in range(len(batches))]
        carry = carry_of(self.engine)
        try:
            return self._single(batches[0], draws[0]) if len(batches) == 1 else self._accumulated(batches, draws)
        except NonFiniteError as error:
            self.clear_gradients()
            put_back(carry if error.partial is None else error.partial.carry)
            raise

    def _single(self, batch: tuple[Tensor, Tensor], draws: Draws) -> StepResult:
        inputs, targets = (each.to(self.device) for each in batch)
        tf, lb, samples = self._teacher_forced(inputs, targets, draws, 1.0)
        result = StepResult(tf=tf, ss=None, lb=lb, grad_norm=self._update("teacher-forced"))
        if samples is None:
            return result
        carry = carry_of(self.engine)
        try:
            ss = self._sampled(draws.mix(inputs, samples), targets, 1.0)
            self._update("scheduled-sampling")
        except NonFiniteError as error:
            raise NonFiniteError(str(error), Partial(result, carry)) from None
        return StepResult(tf=tf, ss=ss, lb=lb, grad_norm=result.grad_norm)

    def _accumulated(self, batches: Sequence[tuple[Tensor, Tensor]], draws: Sequence[Draws]) -> StepResult:
        share = 1.0 / len(batches)
        tfs, sss, lbs = [], [], []
        for batch, draw in zip(batches, draws, strict=True):
            inputs, targets = (each.to(self.device) for each in batch)
            tf, lb, samples = self._teacher_forced(inputs, targets, draw, share)
            tfs.append(tf)
            lbs.append(lb)
            if samples is not None:
                sss.append(self._sampled(draw.mix(inputs, samples), targets, share))
        ss = sum(sss) / len(sss) if sss else None
        return StepResult(tf=sum(tfs) * share, ss=ss, lb=sum(lbs) * share, grad_norm=self._update("accumulated"))

    def _teacher_forced(
        self, inputs: Tensor, targets: Tensor, draws: Draws, share: float
    ) -> tuple[float, float, Tensor | None]:
        with self._precision():
            ce, lb, *hidden = self.engine.tick_chunk_train_ce(inputs, targets, return_hidden=draws.sampling)
        loss = ce + self.hyper.lb_coef * lb
        values = self._finite("teacher-forced", ce, lb)
        (loss * share).backward()  # type: ignore[no-untyped-call]
        # After the backward, which frees the activations, and before the update, which changes the head.
        return *values, self._sample(hidden[0], draws) if draws.sampling else None

    def _sampled(self, mixed: Tensor, targets: Tensor, share: float) -> float:
        with self._precision():
            ce, lb = self.engine.tick_chunk_train_ce(mixed, targets)
        values = self._finite("scheduled-sampling", ce, lb)
        loss = SS_LOSS_WEIGHT * ce + self.hyper.lb_coef * lb
        (loss * share).backward()  # type: ignore[no-untyped-call]
        return values[0]

    @torch.no_grad()
    def _sample(self, hidden: Tensor, draws: Draws) -> Tensor:
        weight: Tensor = self.engine.output_head.weight
        rows = hidden.detach().reshape(-1, hidden.shape[-1]).to(weight.dtype)
        return self.sampler(rows, weight.detach(), SAMPLING_TEMPERATURE, draws.on_device).view(hidden.shape[:2])

    def _finite(self, which: str, ce: Tensor, lb: Tensor) -> tuple[float, float]:
        values = float(ce.detach()), float(lb.detach())
        for name, value in zip(("cross-entropy", "load-balance loss"), values, strict=True):
            if not abs(value) < float("inf"):
                raise NonFiniteError(f"the {which} {name} is {value}")
        return values

    def _update(self, which: str) -> float:
        """Check, clip and step; gradients are cleared. Raises ``NonFiniteError`` before anything is changed."""
        used = {name: parameter for name, parameter in self.parameters.items() if parameter.grad is not None}
        gradients = [_values(parameter.grad) for parameter in used.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            bad = next(
                (name for name, g in zip(used, gradients, strict=True) if not torch.isfinite(g).all()), "all together"
            )
            raise NonFiniteError(f"the {which} gradient norm is {float(norm)} (first in {bad})")
        state = [self.momentum[name] for name in used]
        grad_norm = float(self.optimizer_step(list(used.values()), state, self.hyper.lr, MOMENTUM, MAX_NORM))
        self.clear_gradients()
        return grad_norm

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            yield


class Draws:
    """All randomness of one batch: a pure function of (seed, step, batch), so that a resumed run draws the same."""

    def __init__(self, hyper: Hyper, step: int, index: int, device: torch.device) -> None:
        digest = hashlib.sha256(f"{hyper.seed}:{step}:{index}".encode()).digest()
        seed = int.from_bytes(digest[:7], "big")
        self._on_host = torch.Generator().manual_seed(seed)
        self._ss_prob = hyper.ss_prob
        self.on_device = torch.Generator(device).manual_seed(seed + 1)
        self.sampling = bool(torch.rand((), generator=self._on_host) < hyper.ss_rate)

    def mix(self, inputs: Tensor, samples: Tensor) -> Tensor:
        """Inputs (B,C) where positions but 0 take the sample (B,C) of the position before with probability SS_PROB."""
        lanes, chunk = inputs.shape
        take = torch.rand((lanes, chunk - 1), generator=self._on_host) < self._ss_prob
        mixed = inputs.clone()
        mixed[:, 1:] = torch.where(take.to(inputs.device), samples[:, :-1], inputs[:, 1:])
        return mixed


def carry_of(engine: Engine) -> Carry:
    """Every buffer by reference: a forward pass replaces the carry's tensors and never writes into them."""
    # nn.Module's own listing, since the engine's makes full copies of what it holds compactly.
    listed = ((module, nn.Module.named_buffers(module, recurse=False)) for module in engine.modules())
    return [(module, name, buffer) for module, buffers in listed for name, buffer in buffers]


def put_back(carry: Carry) -> None:
    """Undo the passes since ``carry_of``."""
    for module, name, buffer in carry:
        setattr(module, name, buffer)


def _values(gradient: Tensor) -> Tensor:
    """The stored values of a dense or row-sparse gradient."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
