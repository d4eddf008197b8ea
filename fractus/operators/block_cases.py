"""The block's cases, drawn away from its discontinuities: norms not fresh, start phases between two wraps."""

from __future__ import annotations

import torch
from torch import Tensor

from fractus.core import BlockCarry, attended, clock, norm
from fractus.draw import glorot, normal, uniform
from fractus.kuramoto import TWO_PI, unwrapped_start
from fractus.nn.attention_levels import level_offsets
from fractus.operators import attention, moe
from fractus.operators.moe_cases import KAPPA, PRODUCTION_TEMPERATURE, draw_experts
from fractus.routing import gate_gap
from registry import Bundle, Case, map_leaves


def reference_attention(q: Tensor, k: Tensor, v: Tensor, carry: attention.Carry | None = None) -> attention.Result:
    """The attention operator's reference behind its contract."""
    return attention.attention(attention.einsum, q, k, v, carry)


def reference_moe(hidden: Tensor, phases: Tensor, experts: Bundle, top_k: int, concentration: float) -> moe.Result:
    """The mixture's reference behind its contract."""
    return moe.moe(moe.gather, hidden, phases, experts, top_k, concentration)


def cases() -> tuple[Case, ...]:
    """Both kinds of expert, one to three levels, one token, one head, all experts, a long carry and the 1B shape."""
    small = {"B": 2, "C": 8, "H": 2, "K": 4, "levels": 2, "E": 6, "F": 10, "r": 3, "k": 2, "N": 5, "rank": 3}
    # Every width of the 1B block; the chunk is short, since its oracle gathers two experts' weights for every token,
    # and chunks of 128 are in the 1B cases of the attention and the experts that a block calls.
    real = {"B": 1, "C": 32, "H": 20, "K": 64, "levels": 2, "E": 128, "F": 2048, "r": 64, "k": 2, "N": 16, "rank": 8}
    return (
        Case(name="small", kind="small", sizes=small),
        Case(name="dense_experts", kind="small", sizes={**small, "r": 0}),
        Case(name="zero_carry", kind="small", sizes=small, values="zero_carry"),
        Case(name="ragged", kind="ragged", sizes={**small, "B": 3, "C": 13, "H": 3, "K": 5, "levels": 3, "E": 9}),
        Case(name="one_token", kind="edge", sizes={**small, "C": 1}),
        Case(name="one_head", kind="edge", sizes={**small, "B": 1, "C": 5, "H": 1, "K": 6, "levels": 1}),
        Case(name="all_experts", kind="edge", sizes={**small, "E": 3, "k": 3}),
        Case(name="large", kind="extreme", sizes=small, values="large"),
        Case(name="long_carry", kind="extreme", sizes=small, values="long_carry"),
        Case(name="real_1b", kind="real", sizes=real),
    )


def draw(case: Case, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Bundle | Tensor | BlockCarry]:
    """A block's parameters, h (B,C,D) with a mean and a carry (S, z, phases) as after 20 tokens."""
    sizes = case.sizes
    B, C, H, K, N = sizes["B"], sizes["C"], sizes["H"], sizes["K"], sizes["N"]
    h = normal(generator, dtype, B, C, H * K, mean=0.1)
    tokens = {"zero_carry": 0.0, "long_carry": 1e6}.get(case.values, 20.0)
    features = uniform(generator, dtype, B, H, K, low=1.0, high=2.0)
    values = normal(generator, dtype, B, H, K)
    scatter = tokens**0.5 * normal(generator, dtype, B, H, K, K)
    S = tokens * features.unsqueeze(-1) * values.unsqueeze(-2) + scatter
    phases = uniform(generator, dtype, B, 1, N, high=TWO_PI)
    if case.values == "large":
        h = h * 1e6
    return {
        "parameters": Bundle(draw_parameters(case, generator, dtype)),
        "h": h,
        "carry": (S, tokens * features, phases),
    }


def draw_parameters(case: Case, generator: torch.Generator, dtype: torch.dtype) -> dict[str, object]:
    """The block's tensors under their state-dict names, its numbers and the references of attention and moe."""
    sizes = case.sizes
    D, N, rank, levels = sizes["H"] * sizes["K"], sizes["N"], sizes["rank"], sizes["levels"]
    gain = {name: uniform(generator, dtype, D, low=0.7, high=1.3) for name in ("norm_attn", "norm_moe")}
    bias = {name: normal(generator, dtype, D, std=0.1) for name in ("norm_attn", "norm_moe")}
    # The mean of norm_kur's output is about that of its bias: half an oscillator's spacing keeps every start phase
    # away from the wrap, where the clock is discontinuous.
    gain["norm_kur"] = uniform(generator, dtype, D, low=0.95, high=1.05)
    noise = normal(generator, dtype, D, std=0.1)
    bias["norm_kur"] = noise - noise.mean() + 0.5 / N
    experts = draw_experts({**sizes, "D": D}, generator, dtype)
    return {
        "attn.w_qkv": glorot(generator, dtype, 3, D, D),
        "attn.b_qkv": normal(generator, dtype, 3, D, std=0.1),
        "attn.w_out": glorot(generator, dtype, D, D),
        "attn.b_out": normal(generator, dtype, D, std=0.1),
        "attn.level_logits": normal(generator, dtype, levels, std=0.5),
        "attn.level_offsets": level_offsets(levels).to(dtype),
        **{f"{name}.weight": value for name, value in gain.items()},
        **{f"{name}.bias": value for name, value in bias.items()},
        "kuramoto.omega": uniform(generator, dtype, N, low=-0.5, high=0.5),
        "kuramoto.coupling_u": uniform(generator, dtype, N, rank, low=-1.0, high=1.0),
        "kuramoto.coupling_lambda": uniform(generator, dtype, rank, low=0.2, high=1.0),
        **{f"moe.{name}": value for name, value in experts.items()},
        "n_heads": sizes["H"],
        "n_levels": levels,
        "top_k": sizes["k"],
        "concentration": KAPPA / PRODUCTION_TEMPERATURE,
        "attention": reference_attention,
        "moe": reference_moe,
    }


def margin(parameters: Bundle, h: Tensor, carry: BlockCarry) -> float:
    """The least distance to another result: start phases to the wrap in turns, gates to another choice, relatively."""
    with torch.no_grad():
        parameters, h, carry = map_leaves(_double, (parameters, h, carry))
        h, _, _ = attended(parameters, h, carry)
        start = unwrapped_start(norm(parameters, "norm_kur", h), parameters["kuramoto.omega"].shape[0]) / TWO_PI
        to_wrap = (start - start.round()).abs().min().item()
        routing = clock(parameters, h)[:, -1:, :]
        gap = gate_gap(routing, parameters["moe.expert_phases"], parameters["concentration"], parameters["top_k"])
        return min(to_wrap, gap)


def _double(_: str, leaf: object) -> object:
    return leaf.detach().double() if isinstance(leaf, Tensor) else leaf
