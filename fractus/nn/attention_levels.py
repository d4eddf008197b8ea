"""The offsets that set the levels of the fractal attention apart."""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN_SQUARED = ((1.0 + 5.0**0.5) / 2.0) ** 2


def level_offsets(n_levels: int) -> Tensor:
    """``(phi^2)^(-l)`` for levels 0..n_levels-1, computed in float32 from phi^2 rounded once -> (n_levels,) float32."""
    base = torch.tensor(GOLDEN_SQUARED, dtype=torch.float32)
    return base ** (-torch.arange(n_levels, dtype=torch.float32))
