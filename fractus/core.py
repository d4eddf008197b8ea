"""The block as a pure function: every carry comes in and goes out, nothing is written in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from fractus.kuramoto import rk4_step, start_phases
from fractus.nn.stats import elu_plus_one, stable_softmax
from registry.tree import Bundle

Attention = Callable[..., tuple[Tensor, tuple[Tensor, Tensor]]]
BlockCarry = tuple[Tensor, Tensor, Tensor]


def below(parameters: Bundle, prefix: str) -> Bundle:
    """The entries whose name starts with ``prefix``, without it."""
    return Bundle({key[len(prefix) :]: value for key, value in parameters.items() if key.startswith(prefix)})


def feature_map(x: Tensor, offset: Tensor) -> Tensor:
    """``elu_plus_one(x + offset)``: the positive features of one level, any broadcastable shapes."""
    return elu_plus_one(x + offset)


def attention_layer(
    attn: Bundle, x: Tensor, S: Tensor, z: Tensor, n_heads: int, levels: int, attention: Attention
) -> tuple[Tensor, Tensor, Tensor]:
    """Multi-level linear attention: x (B,C,D), S (B,H,K,K), z (B,H,K) -> (out (B,C,D), S, z), not detached.

    All levels start from the same (S, z); the carry returned is the mean over levels of the final ones.
    """
    B, C, D = x.shape
    K = D // n_heads
    q, k, v = (_project(x, w, b, n_heads) for w, b in zip(attn["w_qkv"].unbind(), attn["b_qkv"].unbind(), strict=True))
    offsets = attn["level_offsets"][:levels].to(x.dtype).view(1, levels, 1, 1, 1)
    q = feature_map(q.unsqueeze(1), offsets).reshape(-1, C, K)
    k = feature_map(k.unsqueeze(1), offsets).reshape(-1, C, K)
    v = _per_level(v, levels)
    y, (S_final, z_final) = attention(q, k, v, (_per_level(S, levels), _per_level(z, levels)))
    weights = stable_softmax(attn["level_logits"]).view(1, levels, 1, 1, 1)
    mixed = (weights * y.reshape(B, levels, n_heads, C, K)).sum(1)
    out = mixed.transpose(1, 2).reshape(B, C, D) @ attn["w_out"] + attn["b_out"]
    S_mean = S_final.reshape(B, levels, n_heads, K, K).mean(1)
    return out, S_mean, z_final.reshape(B, levels, n_heads, K).mean(1)


def attention_tick(
    attn: Bundle, x: Tensor, S: Tensor, z: Tensor, n_heads: int, attention: Attention
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of attention, level 0 alone, unweighted: x (B,1,D), S (B,H,K,K), z (B,H,K) -> (out (B,1,D), S, z).

    The token's k and v enter the carry detached, before it is read out.
    """
    B, _, D = x.shape
    K = D // n_heads
    q, k, v = (_project(x, w, b, n_heads) for w, b in zip(attn["w_qkv"].unbind(), attn["b_qkv"].unbind(), strict=True))
    offset = attn["level_offsets"][0].to(x.dtype)
    q, k = feature_map(q, offset).reshape(-1, 1, K), feature_map(k, offset).detach().reshape(-1, 1, K)
    y, (S, z) = attention(q, k, v.detach().reshape(-1, 1, K), (S.reshape(-1, K, K), z.reshape(-1, K)))
    out = y.reshape(B, n_heads, 1, K).transpose(1, 2).reshape(B, 1, D) @ attn["w_out"] + attn["b_out"]
    return out, S.reshape(B, n_heads, K, K), z.reshape(B, n_heads, K)


def clock(parameters: Bundle, h: Tensor) -> Tensor:
    """``kuramoto(norm_kur(h))``: h (B,C,D) -> phases (B,C,N), in h's dtype even under autocast.

    The start phases of a fresh layer sit at the wrap, where a rounding moves the mean phase by up to 0.4 rad.
    """
    with torch.autocast(device_type=h.device.type, enabled=False):
        omega = parameters["kuramoto.omega"]
        theta = start_phases(norm(parameters, "norm_kur", h), omega.shape[0])
        return rk4_step(theta, omega, parameters["kuramoto.coupling_u"], parameters["kuramoto.coupling_lambda"])


def attended(parameters: Bundle, h: Tensor, carry: BlockCarry) -> tuple[Tensor, Tensor, Tensor]:
    """``h + attn(norm_attn(h))`` and the carry's S and z after the chunk, not detached."""
    S, z, _ = carry
    x = norm(parameters, "norm_attn", h)
    heads, levels = parameters["n_heads"], parameters["n_levels"]
    out, S, z = attention_layer(below(parameters, "attn."), x, S, z, heads, levels, parameters["attention"])
    return h + out, S, z


def block_core(parameters: Bundle, h: Tensor, carry: BlockCarry) -> tuple[Tensor, Tensor, BlockCarry]:
    """One CTE block over a chunk: h (B,C,D), carry (S (B,H,K,K), z (B,H,K), phases) -> (h, load_balance (), carry).

    ``h += attn(norm_attn(h))``; ``theta = kuramoto(norm_kur(h))``; ``h += moe(norm_moe(h), theta of the last
    position)``. The carry returned is detached and its phases are theta (B,C,N); the phases given are not read.
    """
    h, S, z = attended(parameters, h, carry)
    theta = clock(parameters, h)
    h, balance = _routed(parameters, h, theta[:, -1:, :])
    return h, balance, (S.detach(), z.detach(), theta.detach())


def tick_core(parameters: Bundle, h: Tensor, carry: BlockCarry) -> tuple[Tensor, Tensor, BlockCarry]:
    """One CTE block over a single token: h (B,1,D) and the carry as ``block_core``, with ``attention_tick``."""
    S, z, _ = carry
    x = norm(parameters, "norm_attn", h)
    out, S, z = attention_tick(below(parameters, "attn."), x, S, z, parameters["n_heads"], parameters["attention"])
    h = h + out
    theta = clock(parameters, h)
    h, balance = _routed(parameters, h, theta)
    return h, balance, (S.detach(), z.detach(), theta.detach())


def _routed(parameters: Bundle, h: Tensor, phases: Tensor) -> tuple[Tensor, Tensor]:
    experts = below(parameters, "moe.")
    moe: Callable[..., Any] = parameters["moe"]
    x = norm(parameters, "norm_moe", h)
    out, balance = moe(x, phases, experts, parameters["top_k"], parameters["concentration"])
    return h + out, balance


def norm(parameters: Bundle, name: str, h: Tensor) -> Tensor:
    """LayerNorm over D with the bundle's ``name.weight`` and ``name.bias`` and the default eps, in h's dtype."""
    return layer_norm(h, h.shape[-1:], parameters[f"{name}.weight"], parameters[f"{name}.bias"]).to(h.dtype)


def _project(x: Tensor, weight: Tensor, bias: Tensor, n_heads: int) -> Tensor:
    B, C, D = x.shape
    return (x @ weight + bias).to(x.dtype).view(B, C, n_heads, D // n_heads).transpose(1, 2)


def _per_level(heads: Tensor, levels: int) -> Tensor:
    """(B,H,...) repeated for every level and flattened in the order (B, level, head): (B*levels*H, ...)."""
    return heads.unsqueeze(1).expand(-1, levels, *heads.shape[1:]).reshape(-1, *heads.shape[2:])
