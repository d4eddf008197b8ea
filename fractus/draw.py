"""Seeded draws that the operators' cases share; every one advances only the generator it is given."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def normal(generator: torch.Generator, dtype: torch.dtype, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
    """Independent N(mean, std^2) in ``dtype`` on the CPU."""
    return torch.randn(shape, generator=generator, dtype=dtype) * std + mean


def uniform(generator: torch.Generator, dtype: torch.dtype, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Independent U(low, high) in ``dtype`` on the CPU."""
    return torch.rand(shape, generator=generator, dtype=dtype) * (high - low) + low


def glorot(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """U(+-sqrt(2 / (sum of the last two sizes))), the body's initial distribution of matrices."""
    limit = math.sqrt(2.0 / (shape[-1] + shape[-2]))
    return uniform(generator, dtype, *shape, low=-limit, high=limit)


def integers(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    """Independent int64 from 0 to ``high - 1``."""
    return torch.randint(high, shape, generator=generator)
