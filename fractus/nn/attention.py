"""Multi-level linear attention as a layer, and the attention kernels under the names that existing scripts import."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from fractus.core import Attention, attention_layer, feature_map
from fractus.nn.attention_levels import level_offsets
from fractus.operators.attention import Carry, attention, chunked, cumsum, einsum, looped
from registry.tree import Bundle

IMPLEMENTATIONS = {"einsum": einsum, "looped": looped, "cumsum": cumsum, "chunked": chunked}
# The one mutable global of the project: existing scripts choose the kernel of engines already built through it.
_selected = "cumsum"


def set_attention_impl(name: str) -> None:
    """Choose the kernel of every engine and layer that was not given one; ``ValueError`` for an unknown name."""
    global _selected
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"no attention implementation {name!r}; there are: {', '.join(IMPLEMENTATIONS)}")
    _selected = name


def selected_attention() -> Attention:
    """The kernel that ``set_attention_impl`` chose ("cumsum" at first), behind the operator's contract."""
    return functools.partial(attention, IMPLEMENTATIONS[_selected])


class FractalLinearAttention(nn.Module):
    """Causal linear attention at ``n_levels`` levels, mixed by ``softmax(level_logits)``.

    ``ValueError`` unless n_heads * d_head = d_model and n_levels >= 1.
    """

    level_offsets: Tensor

    def __init__(self, d_model: int, n_heads: int, d_head: int, n_levels: int = 3) -> None:
        super().__init__()
        if n_heads < 1 or d_head < 1 or n_heads * d_head != d_model:
            raise ValueError(f"n_heads * d_head must be d_model: {n_heads} * {d_head} is not {d_model}")
        if n_levels < 1:
            raise ValueError(f"n_levels must be at least 1, not {n_levels}")
        self.d_model, self.n_heads, self.d_head, self.n_levels = d_model, n_heads, d_head, n_levels
        limit = math.sqrt(2.0 / (d_model + d_model))
        self.w_qkv = nn.Parameter(torch.empty(3, d_model, d_model).uniform_(-limit, limit))
        self.b_qkv = nn.Parameter(torch.zeros(3, d_model))
        self.w_out = nn.Parameter(torch.empty(d_model, d_model).uniform_(-limit, limit))
        self.b_out = nn.Parameter(torch.zeros(d_model))
        self.level_logits = nn.Parameter(torch.zeros(n_levels))
        self.register_buffer("level_offsets", level_offsets(n_levels).to(torch.get_default_dtype()))

    def feature_map(self, x: Tensor, level: int) -> Tensor:
        """``elu_plus_one(x + (phi^2)^(-level))``, any shape."""
        return feature_map(x, self.level_offsets[level].to(x.dtype))

    def tensors(self) -> Bundle:
        """Parameters and buffers under their state-dict names."""
        return Bundle({**self._parameters, **self._buffers})

    def forward(self, x: Tensor) -> Tensor:
        """x (B,L,D) -> (B,L,D), from a zero carry."""
        B = x.shape[0]
        S = x.new_zeros(B, self.n_heads, self.d_head, self.d_head)
        z = x.new_zeros(B, self.n_heads, self.d_head)
        return attention_layer(self.tensors(), x, S, z, self.n_heads, self.n_levels, selected_attention())[0]


def _linear_attention_causal_one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The recurrence of one head, token by token from a zero carry: q, k, v (L,K) or (B,L,K) -> y of that shape."""
    if q.dim() == 2:
        return _linear_attention_causal_one_head(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)).squeeze(0)
    return attention(looped, q, k, v)[0]


def _linear_attention_causal_vectorized(
    q: Tensor, k: Tensor, v: Tensor, carry: Carry | None = None
) -> Tensor | tuple[Tensor, Carry]:
    """q, k, v (G,C,K) -> y (G,C,K), or (y, (S, z)) when a carry is given, with the selected kernel."""
    return _as_called(selected_attention()(q, k, v, carry), carry)


def _linear_attention_causal_einsum(
    q: Tensor, k: Tensor, v: Tensor, carry: Carry | None = None
) -> Tensor | tuple[Tensor, Carry]:
    """The reference kernel in the form of ``_linear_attention_causal_vectorized``."""
    return _as_called(attention(einsum, q, k, v, carry), carry)


def _linear_attention_causal_cumsum(
    q: Tensor, k: Tensor, v: Tensor, carry: Carry | None = None
) -> Tensor | tuple[Tensor, Carry]:
    """The running-sum kernel in the form of ``_linear_attention_causal_vectorized``."""
    return _as_called(attention(cumsum, q, k, v, carry), carry)


def _linear_attention_causal_chunked(
    q: Tensor, k: Tensor, v: Tensor, carry: Carry | None = None, block: int = 64
) -> Tensor | tuple[Tensor, Carry]:
    """The chunked kernel in the form of ``_linear_attention_causal_vectorized``."""
    return _as_called(attention(functools.partial(chunked, block=block), q, k, v, carry), carry)


def _as_called(result: tuple[Tensor, Carry], carry: Carry | None) -> Tensor | tuple[Tensor, Carry]:
    return result[0] if carry is None else result
