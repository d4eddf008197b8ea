"""Clip to a total norm, then SGD with momentum, in place: the contract and the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fractus import tolerances
from fractus.contract import expect
from fractus.draw import normal
from registry import Case, operator, variant

CLIP_EPSILON = 1e-6


def cases() -> tuple[Case, ...]:
    """Gradients above and below the norm, absent ones, row-sparse ones, zero ones, a momentum under way."""
    return (
        Case(name="small", kind="small", sizes={"rows": 6, "D": 5, "tensors": 4}),
        Case(name="first_step", kind="small", sizes={"rows": 4, "D": 3, "tensors": 3}, values="first_step"),
        Case(name="below_norm", kind="small", sizes={"rows": 5, "D": 4, "tensors": 4}, values="below_norm"),
        Case(name="sparse", kind="ragged", sizes={"rows": 9, "D": 7, "tensors": 4}, values="sparse"),
        Case(name="absent", kind="edge", sizes={"rows": 3, "D": 2, "tensors": 5}, values="absent"),
        Case(name="one_element", kind="edge", sizes={"rows": 1, "D": 1, "tensors": 1}),
        Case(name="zero_gradient", kind="edge", sizes={"rows": 3, "D": 3, "tensors": 3}, values="zero_gradient"),
        Case(name="large", kind="extreme", sizes={"rows": 6, "D": 5, "tensors": 4}, values="large"),
        Case(name="real_1b", kind="real", sizes={"rows": 3840, "D": 1280, "tensors": 4}),
    )


def draw(case: Case, generator: torch.Generator, dtype: torch.dtype) -> dict[str, tuple[Tensor, ...] | float]:
    """Parameters whose ``.grad`` is set (dense, None or sparse by rows), momentum, and production's constants."""
    rows, D, count = case.sizes["rows"], case.sizes["D"], case.sizes["tensors"]
    shapes = [(rows, D) if index % 2 == 0 else (D,) for index in range(count)]
    parameters = tuple(normal(generator, dtype, *shape).requires_grad_() for shape in shapes)
    scale = {"below_norm": 1e-4, "zero_gradient": 0.0, "large": 1e15}.get(case.values, 1.0)
    for index, parameter in enumerate(parameters):
        gradient = normal(generator, dtype, *parameter.shape, mean=0.2) * scale
        if case.values == "sparse" and parameter.dim() == 2:
            gradient = by_rows(generator, gradient)
        parameter.grad = None if case.values == "absent" and index % 2 == 1 else gradient
    state = tuple(normal(generator, dtype, *shape) for shape in shapes)
    if case.values == "first_step":
        state = tuple(torch.zeros_like(buffer) for buffer in state)
    return {"parameters": parameters, "state": state, "lr": 7e-4, "momentum": 0.9, "max_norm": 1.0}


def by_rows(generator: torch.Generator, gradient: Tensor) -> Tensor:
    """A row-sparse, uncoalesced COO tensor of about half the rows of a dense (rows, D), one row twice."""
    kept = torch.randperm(gradient.shape[0], generator=generator)[: max(1, gradient.shape[0] // 2)]
    kept = torch.cat([kept, kept[:1]])
    return torch.sparse_coo_tensor(kept.unsqueeze(0), gradient[kept], tuple(gradient.shape), check_invariants=True)


@operator(
    name="optimizer_step",
    reference="dense",
    cases=cases,
    draw=draw,
    outputs=("grad_norm",),
    properties=("forward", "determinism", "purity", "totality", "identity"),
    tolerance=tolerances.OPTIMIZER_STEP,
    mutates=("parameters", "state"),
    ranges={"rows": (1, 9), "D": (1, 8), "tensors": (1, 5)},
)
def optimizer_step(
    arithmetic: Callable[..., Tensor],
    parameters: Sequence[Tensor],
    state: Sequence[Tensor],
    lr: float,
    momentum: float,
    max_norm: float,
) -> Tensor:
    """``m = momentum*m + g*min(1, max_norm/(|g| + 1e-6))``, ``p = p - lr*m``, in place.

    parameters: tensors whose ``.grad`` is dense, row-sparse COO, or None (skipped with its momentum); a tensor given
    twice counts once, with the first momentum. state: as many momentum buffers of the same shapes, zero at first.
    ``|g|`` is the 2-norm over all gradients, returned as it was before clipping, (). The gradients are not changed.
    ``ValueError`` names a wrong length, shape, dtype or device. Source: torch's clip_grad_norm_ and SGD.
    """
    if len(parameters) != len(state):
        raise ValueError(f"state must hold {len(parameters)} buffers, one a parameter, not {len(state)}")
    for index, (parameter, buffer) in enumerate(zip(parameters, state, strict=True)):
        expect(f"state[{index}]", buffer, tuple(parameter.shape), parameter.dtype, parameter.device)
    if lr < 0 or momentum < 0 or not max_norm > 0:
        raise ValueError(f"lr and momentum must be >= 0 and max_norm > 0, not {lr}, {momentum} and {max_norm}")
    return arithmetic(parameters, state, lr, momentum, max_norm)


def trained(parameters: Sequence[Tensor], state: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(parameter, momentum, gradient) of every distinct parameter that has a gradient, sparse ones coalesced."""
    seen: set[int] = set()
    triples = []
    for parameter, buffer in zip(parameters, state, strict=True):
        if parameter.grad is None or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        gradient = parameter.grad.coalesce() if parameter.grad.is_sparse else parameter.grad
        triples.append((parameter, buffer, gradient))
    return triples


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all entries of all gradients, a coalesced sparse one by its values -> ()."""
    if not gradients:
        return torch.zeros(())
    values = [gradient.values() if gradient.is_sparse else gradient for gradient in gradients]
    norms = [torch.linalg.vector_norm(value) for value in values]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


@variant(operator="optimizer_step", name="dense")
def dense(parameters: Sequence[Tensor], state: Sequence[Tensor], lr: float, momentum: float, max_norm: float) -> Tensor:
    """Reference: every row of every parameter that has a gradient moves by its momentum."""
    with torch.no_grad():
        triples = trained(parameters, state)
        norm = total_norm([gradient for _, _, gradient in triples])
        coefficient = torch.clamp(max_norm / (norm + CLIP_EPSILON), max=1.0)
        for parameter, buffer, gradient in triples:
            full = gradient.to_dense() if gradient.is_sparse else gradient
            buffer.mul_(momentum).add_(full * coefficient.to(full.device))
            parameter.add_(buffer, alpha=-lr)
        return norm
