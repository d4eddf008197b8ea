"""The attention operator's cases: sizes and values, and how the inputs are drawn from them."""

from __future__ import annotations

import torch
from torch import Tensor

from fractus.draw import normal, uniform
from fractus.nn.stats import elu_plus_one
from registry import Case

TOKENS_ABSORBED = 1e6


def cases() -> tuple[Case, ...]:
    """Blocks of every proven size met once and several times, odd and single lengths, the recurrence's extremes."""
    return (
        Case(name="small", kind="small", sizes={"G": 3, "C": 128, "K": 8}),
        Case(name="several_blocks", kind="small", sizes={"G": 2, "C": 256, "K": 4}),
        Case(name="zero_carry", kind="small", sizes={"G": 2, "C": 64, "K": 6}, values="zero_carry"),
        Case(name="ragged_77", kind="ragged", sizes={"G": 3, "C": 77, "K": 5}),
        Case(name="ragged_129", kind="ragged", sizes={"G": 2, "C": 129, "K": 7}),
        Case(name="one_token", kind="edge", sizes={"G": 3, "C": 1, "K": 8}),
        Case(name="one_group", kind="edge", sizes={"G": 1, "C": 64, "K": 3}),
        Case(name="zero_denominator", kind="edge", sizes={"G": 2, "C": 128, "K": 4}, values="zero_denominator"),
        Case(name="tiny_denominator", kind="extreme", sizes={"G": 2, "C": 128, "K": 4}, values="tiny_denominator"),
        Case(name="threshold", kind="extreme", sizes={"G": 2, "C": 64, "K": 4}, values="threshold"),
        Case(name="large", kind="extreme", sizes={"G": 2, "C": 64, "K": 8}, values="large"),
        Case(name="long_carry", kind="extreme", sizes={"G": 2, "C": 128, "K": 8}, values="long_carry"),
        Case(name="real_1b", kind="real", sizes={"G": 80, "C": 128, "K": 64}),
    )


def draw(case: Case, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
    """q, k (G,C,K) positive features, v (G,C,K) with a mean and a scale of its own in each group, carry (S, z)."""
    G, C, K = case.sizes["G"], case.sizes["C"], case.sizes["K"]
    q = elu_plus_one(normal(generator, dtype, G, C, K))
    k = elu_plus_one(normal(generator, dtype, G, C, K))
    group = torch.arange(1, G + 1, dtype=dtype).view(G, 1, 1)
    v = (normal(generator, dtype, G, C, K) + uniform(generator, dtype, G, 1, K, low=-1.0, high=1.0)) * (0.5 + group / G)
    S, z = _carry(generator, dtype, G, K, tokens=20.0)
    if case.values in ("zero_carry", "zero_denominator"):
        S, z = torch.zeros_like(S), torch.zeros_like(z)
    if case.values == "zero_denominator":
        k[:, :3] = 0.0
        q[:, 1::5] = 0.0
    if case.values == "tiny_denominator":
        # q.z between 1e-9 and 1e-6 on every row: an epsilon larger than 1e-20 shows in the quotient.
        q, k = _exponent(generator, dtype, G, C, K, -10.5), _exponent(generator, dtype, G, C, K, -10.5)
        S, z = S * 1e-6, z * 1e-6
    if case.values == "threshold":
        # Rows by turns far below and far above the 1e-10 where the output becomes 0.
        q, k = _exponent(generator, dtype, G, C, K, -8.0), _exponent(generator, dtype, G, C, K, -10.0)
        q[:, ::2] *= 1e-8
        S, z = S * 1e-5, z * 1e-5
    if case.values == "large":
        q, k, v, S, z = q * 1e8, k * 1e8, v * 1e8, S * 1e16, z * 1e8
    if case.values == "long_carry":
        S, z = _carry(generator, dtype, G, K, tokens=TOKENS_ABSORBED)
    return {"q": q, "k": k, "v": v, "carry": (S, z)}


def _exponent(generator: torch.Generator, dtype: torch.dtype, G: int, C: int, K: int, mean: float) -> Tensor:
    return torch.exp(normal(generator, dtype, G, C, K, std=0.5, mean=mean))


def _carry(generator: torch.Generator, dtype: torch.dtype, G: int, K: int, tokens: float) -> tuple[Tensor, Tensor]:
    """A state as after ``tokens`` tokens: the mean grows with their number, its scatter with the root of it."""
    k = elu_plus_one(normal(generator, dtype, G, K)) + 0.2
    v = normal(generator, dtype, G, K)
    S = tokens * k.unsqueeze(-1) * v.unsqueeze(-2) + tokens**0.5 * normal(generator, dtype, G, K, K)
    return S, tokens * k
