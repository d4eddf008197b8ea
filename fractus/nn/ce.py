"""Chunked cross-entropy and sampling under the names that existing scripts import."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fractus.operators import cross_entropy, sampler


def chunked_cross_entropy(h: Tensor, W: Tensor, targets: Tensor, ce_chunk: int) -> Tensor:
    """Mean cross-entropy of ``h W^T`` over all rows, ce_chunk at a time: h (...,D), W (V,D), targets (...) -> ()."""
    if ce_chunk < 1:
        raise ValueError(f"ce_chunk must be at least 1, not {ce_chunk}")
    if targets.shape != h.shape[:-1]:
        raise ValueError(f"targets must have shape {tuple(h.shape[:-1])}, not {tuple(targets.shape)}")
    arithmetic = functools.partial(cross_entropy.chunked, ce_chunk=ce_chunk)
    return cross_entropy.cross_entropy(arithmetic, h.reshape(-1, h.shape[-1]), W, targets.reshape(-1))


def sample_tokens_chunked(
    h: Tensor, W: Tensor, temperature: float, ce_chunk: int, generator: torch.Generator | None = None
) -> Tensor:
    """Tokens ~ softmax(h W^T / temperature): h (...,D), W (V,D) -> (...) int64; ce_chunk rows at a time."""
    if ce_chunk < 1:
        raise ValueError(f"ce_chunk must be at least 1, not {ce_chunk}")
    arithmetic = functools.partial(sampler.chunked, ce_chunk=ce_chunk)
    rows = h.reshape(-1, h.shape[-1])
    return sampler.sampler(arithmetic, rows, W, temperature, generator).reshape(h.shape[:-1])
