"""Checks that the operators' contracts share: shapes, dtypes and devices, refused with both sides named."""

from __future__ import annotations

import torch
from torch import Tensor


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``ValueError`` unless ``tensor`` has this shape, dtype and device; both sides are named."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor {shape} {dtype}, not {type(tensor).__name__}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, not {tuple(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, not {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, not {tensor.device}")


def expect_floating(name: str, tensor: Tensor, letters: str) -> None:
    """Raise ``ValueError`` unless ``tensor`` is floating with a non-empty axis for each of ``letters`` ("G,C,K")."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a floating tensor ({letters}), not {type(tensor).__name__}")
    if tensor.dim() != len(letters.split(",")) or 0 in tensor.shape:
        raise ValueError(f"{name} must have shape ({letters}) with no empty axis, not {tuple(tensor.shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating, not {tensor.dtype}")
