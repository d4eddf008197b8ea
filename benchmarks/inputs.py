"""Fresh inputs by index: the case's own draw for checks, and variations of two draws for timing."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from registry import Bundle, Case, Operator, leaves, map_leaves

LARGE_BYTES = 16 * 2**20
LEAST_MARGIN = 1e-4
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16_autocast": torch.float32}
Arguments = dict[str, Any]


def drawn(operator: Operator, case: Case, seed: int, dtype: str, device: str) -> Arguments:
    """The case's arguments for a seed, on the device; a draw within rounding of a discontinuity is drawn again."""
    for attempt in range(16):
        generator = torch.Generator().manual_seed(seed + 1_000_003 * attempt)
        arguments = operator.draw(case, generator, DTYPES[dtype])
        if operator.margin is None or operator.margin(*arguments.values()) >= LEAST_MARGIN:
            return moved(arguments, device)
    raise ValueError(f"{operator.name} {case.name}: 16 draws in a row lie within {LEAST_MARGIN} of a discontinuity")


def moved(arguments: Mapping[str, Any], device: str) -> Arguments:
    """The same arguments on a device, gradients that they carry included."""

    def place(_: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return torch.Generator(device).manual_seed(leaf.initial_seed()) if device != "cpu" else leaf
        if not isinstance(leaf, Tensor) or device == "cpu":
            return leaf
        placed = leaf.detach().to(device).requires_grad_(leaf.requires_grad)
        placed.grad = None if leaf.grad is None else leaf.grad.to(device)
        return placed

    return {name: map_leaves(place, value, name) for name, value in arguments.items()}


def with_operators(arguments: Arguments, chosen: Mapping[str, Any]) -> Arguments:
    """Arguments whose bundles name other operators (a block's attention and moe) get those of the recipe."""

    def exchange(value: Any) -> Any:
        if not isinstance(value, Bundle):
            return value
        return value.replace(**{name: chosen[name] for name in chosen if callable(value.get(name))})

    return {name: exchange(value) for name, value in arguments.items()}


def varied(arguments: Arguments, seed: int) -> Arguments:
    """Other values of the same kind: floating rows scaled by 0.75 to 1.25, integers rolled, generators reseeded.

    Leaves over 16 MiB stay: two whole draws take turns for them, so consecutive calls differ in these too.
    """
    generator = torch.Generator().manual_seed(seed)

    def change(_: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return torch.Generator(leaf.device).manual_seed(seed)
        if not isinstance(leaf, Tensor) or leaf.numel() * leaf.element_size() > LARGE_BYTES:
            return leaf
        if not leaf.is_floating_point():
            return leaf.reshape(-1).roll(seed % max(1, leaf.numel())).reshape(leaf.shape)
        new = scaled(leaf.detach(), generator)
        if leaf.grad is not None:
            new.requires_grad_()
            new.grad = leaf.grad if leaf.grad.is_sparse else scaled(leaf.grad, generator)
        return new

    return {name: map_leaves(change, value, name) for name, value in arguments.items()}


def scaled(leaf: Tensor, generator: torch.Generator) -> Tensor:
    """Each row of the last axis times its own factor between 0.75 and 1.25."""
    rows = (*leaf.shape[:-1], 1) if leaf.dim() else ()
    factor = 0.75 + 0.5 * torch.rand(rows, generator=generator, dtype=torch.float64)
    return leaf * factor.to(leaf.dtype).to(leaf.device)


def tracked(arguments: Arguments, patterns: tuple[str, ...]) -> tuple[Arguments, dict[str, Tensor]]:
    """Arguments whose differentiable leaves are new leaves of autograd over the same storage, and those by name."""
    found: dict[str, Tensor] = {}

    def track(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            return leaf
        found[name] = leaf.detach().requires_grad_()
        return found[name]

    return {name: map_leaves(track, value, name) for name, value in arguments.items()}, found


def size_bytes(value: Any, least: int = 0) -> int:
    """Bytes of the tensors in a tree, those up to ``least`` bytes left out."""
    sizes = [leaf.numel() * leaf.element_size() for _, leaf in leaves(value) if isinstance(leaf, Tensor)]
    return sum(size for size in sizes if not least or size <= least)
