"""Elementary functions of the body: the positive feature map and a softmax that never divides by zero."""

from __future__ import annotations

import torch
from torch import Tensor

MIN_SUM = 1e-10


def elu_plus_one(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Positive feature map ``x + 1 if x > 0 else alpha * (exp(x) - 1) + 1``, ``exp(x)`` at alpha 1; any shape."""
    # The untaken branch is clamped: exp of a large x would overflow and its zero cotangent become NaN.
    below = torch.exp(x.clamp(max=0.0))
    if alpha != 1.0:
        below = alpha * (below - 1.0) + 1.0
    return torch.where(x > 0, x + 1.0, below)


def normalise(weights: Tensor, dim: int = -1) -> Tensor:
    """``weights / sum(weights)`` along ``dim``, uniform where the sum is at most 1e-10; a NaN sum stays NaN."""
    total = weights.sum(dim=dim, keepdim=True)
    tiny = total <= MIN_SUM
    # Safe before the division, so that the gradient of the untaken branch is finite.
    shares = weights / torch.where(tiny, torch.ones_like(total), total)
    return torch.where(tiny, torch.full_like(shares, 1.0 / weights.shape[dim]), shares)


def stable_softmax(logits: Tensor, dim: int = -1) -> Tensor:
    """Softmax of ``logits - max`` along ``dim``, uniform where the sum of exponentials is below 1e-10."""
    peak = logits.detach().amax(dim=dim, keepdim=True)
    # A row of -inf has no peak to subtract: its exponentials are all zero and the row is uniform.
    peak = torch.where(torch.isneginf(peak), torch.zeros_like(peak), peak)
    return normalise(torch.exp(logits - peak), dim)
