"""Causal linear attention with a carry: the contract, the reference and the other ways to the same sums."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fractus import tolerances
from fractus.contract import expect, expect_floating
from fractus.operators.attention_cases import cases, draw
from registry import Option, operator, variant

Carry = tuple[Tensor, Tensor]
Result = tuple[Tensor, Carry]

TINY = 1e-10
EPSILON = 1e-20


@operator(
    name="attention",
    reference="einsum",
    cases=cases,
    draw=draw,
    outputs=("y", "S", "z"),
    properties=(
        "forward",
        "gradient",
        "carry",
        "causality",
        "determinism",
        "purity",
        "layout",
        "totality",
        "poison",
        "autocast",
        "memory",
        "identity",
    ),
    tolerance=tolerances.ATTENTION,
    differentiable=("q", "k", "v", "carry.0", "carry.1"),
    carry=(("carry.0", "S"), ("carry.1", "z")),
    time={"q": 1, "k": 1, "v": 1, "y": 1},
    slices={"y": (0,), "S": (0,), "z": (0,), "d[qkv]": (0,), "dcarry.*": (0,)},
    ranges={"G": (1, 4), "C": (1, 150), "K": (2, 12)},
)
def attention(arithmetic: Callable[..., Result], q: Tensor, k: Tensor, v: Tensor, carry: Carry | None = None) -> Result:
    """Inclusive causal linear attention.

    ``S_t = S_0 + sum_{i<=t} k_i v_i^T``, ``z_t = z_0 + sum_{i<=t} k_i``, ``y_t = (q_t S_t) / (q_t.z_t + 1e-20)``,
    0 where ``|q_t.z_t| <= 1e-10``. q, k, v (G,C,K) of one floating dtype, q and k feature-mapped; carry
    (S (G,K,K), z (G,K)) of the same dtype, None for zeros. Returns y (G,C,K) and the final (S, z), also under
    autocast in the dtype of q. ``ValueError`` names a wrong shape, dtype or device.
    Source: Katharopoulos et al. 2020, "Transformers are RNNs", with a running carry.
    """
    expect_floating("q", q, "G,C,K")
    G, _, K = q.shape
    expect("k", k, tuple(q.shape), q.dtype, q.device)
    expect("v", v, tuple(q.shape), q.dtype, q.device)
    if carry is None:
        carry = (q.new_zeros(G, K, K), q.new_zeros(G, K))
    if not isinstance(carry, (tuple, list)) or len(carry) != 2:
        raise ValueError(f"carry must be the pair (S, z) or None, not {type(carry).__name__}")
    S, z = carry
    expect("carry S", S, (G, K, K), q.dtype, q.device)
    expect("carry z", z, (G, K), q.dtype, q.device)
    return arithmetic(q, k, v, (S, z))


def readout(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / (denominator + 1e-20)``, 0 where ``|denominator| <= 1e-10``: (...,K), (...) -> (...,K).

    The denominator is made safe before the division, so gradients are finite there; a NaN one gives NaN.
    """
    tiny = (denominator.abs() <= TINY).unsqueeze(-1)
    safe = torch.where(tiny, torch.ones_like(denominator).unsqueeze(-1), denominator.unsqueeze(-1))
    return torch.where(tiny, torch.zeros_like(numerator), numerator / (safe + EPSILON))


@variant(operator="attention", name="einsum")
def einsum(q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> Result:
    """Reference: the causal sum as a product with a triangular mask; O(G*C^2*K^2) operations, O(G*C*K^2) memory."""
    S_0, z_0 = carry
    C = q.shape[1]
    mask = torch.ones(C, C, dtype=q.dtype, device=q.device).tril()
    outer = torch.einsum("gjp,gjq->gjpq", k, v)
    S = S_0.unsqueeze(1) + torch.einsum("tj,gjpq->gtpq", mask, outer)
    z = z_0.unsqueeze(1) + torch.einsum("tj,gjp->gtp", mask, k)
    numerator = torch.einsum("gtp,gtpq->gtq", q, S)
    y = readout(numerator, (q * z).sum(-1))
    return y.to(q.dtype), (S[:, -1].clone(), z[:, -1].clone())


@variant(operator="attention", name="looped")
def looped(q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> Result:
    """The recurrence as it is written, one token after the other."""
    S, z = carry
    outputs = []
    for q_t, k_t, v_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
        S = S + k_t.unsqueeze(-1) * v_t.unsqueeze(-2)
        z = z + k_t
        outputs.append(readout((q_t.unsqueeze(1) @ S).squeeze(1), (q_t * z).sum(-1)))
    return torch.stack(outputs, 1).to(q.dtype), (S, z)


@variant(operator="attention", name="cumsum")
def cumsum(q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> Result:
    """The causal sum as a running sum of outer products; O(G*C*K^2) operations and memory."""
    S_0, z_0 = carry
    S = S_0.unsqueeze(1) + (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1)
    z = z_0.unsqueeze(1) + k.cumsum(1)
    numerator = (q.unsqueeze(-2) @ S).squeeze(-2)
    y = readout(numerator, (q * z).sum(-1))
    return y.to(q.dtype), (S[:, -1].clone(), z[:, -1].clone())


def chunked_bytes(sizes: dict[str, int], itemsize: int, block: int = 64) -> int:
    """Peak bytes of ``chunked`` above inputs and outputs: scores and states, or the outer products where ragged."""
    G, C, K = sizes["G"], sizes["C"], sizes["K"]
    rows = 8 * G * C * K
    if C % block:
        return itemsize * (rows + 4 * G * C * K * K)
    return itemsize * (rows + 3 * G * C * block + (C // block + 3) * G * K * K)


@variant(
    operator="attention",
    name="chunked",
    options={"block": Option(default=64, low=16, high=128)},
    memory_bound=chunked_bytes,
)
def chunked(q: Tensor, k: Tensor, v: Tensor, carry: Carry, *, block: int = 64) -> Result:
    """Masked scores inside a block, the running (S, z) between blocks; ``cumsum`` where block does not divide C."""
    C = q.shape[1]
    if C % block:
        return cumsum(q, k, v, carry)
    S, z_0 = carry
    z = z_0.unsqueeze(1) + k.cumsum(1)
    numerators = []
    for q_b, k_b, v_b in zip(q.split(block, 1), k.split(block, 1), v.split(block, 1), strict=True):
        # tril sets zeros and does not multiply by them: a NaN in a later key stays out of earlier rows.
        scores = (q_b @ k_b.transpose(1, 2)).tril()
        numerators.append(scores @ v_b + q_b @ S)
        S = S + k_b.transpose(1, 2) @ v_b
    y = readout(torch.cat(numerators, 1), (q * z).sum(-1))
    return y.to(q.dtype), (S, z[:, -1].clone())
