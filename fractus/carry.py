"""The stored form of the attention carry: (B, D, D), block diagonal by head, against the compact (B, H, K, K)."""

from __future__ import annotations

import torch
from torch import Tensor


def to_full(compact: Tensor) -> Tensor:
    """(B,H,K,K) -> (B,D,D): head h's state at rows and columns h*K..h*K+K-1, zeros elsewhere."""
    B, H, K, _ = compact.shape
    full = compact.new_zeros(B, H, K, H, K)
    head = torch.arange(H, device=compact.device)
    full[:, head, :, head] = compact.transpose(0, 1)
    return full.view(B, H * K, H * K)


def to_compact(full: Tensor, n_heads: int) -> Tensor:
    """(B,D,D) -> a new (B,H,K,K); ``ValueError`` for another shape or where something stands between the heads."""
    D = full.shape[-1]
    if full.dim() != 3 or full.shape[1] != D or D % n_heads:
        raise ValueError(f"attn_S must have shape (B, D, D) with D a multiple of {n_heads}, not {tuple(full.shape)}")
    heads = full.reshape(full.shape[0], n_heads, D // n_heads, n_heads, D // n_heads)
    compact = heads.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).contiguous()
    if not full.is_meta and full.count_nonzero() != compact.count_nonzero():
        raise ValueError(f"attn_S {tuple(full.shape)} is not block diagonal in {n_heads} heads")
    return compact.clone()
