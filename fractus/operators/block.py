"""One CTE block as an operator: the contract, the plain reference and the activation-checkpointed form."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fractus import tolerances
from fractus.contract import expect, expect_floating
from fractus.core import BlockCarry, block_core
from fractus.operators.block_cases import cases, draw, margin
from registry import Bundle, operator, variant

Result = tuple[Tensor, Tensor, BlockCarry]
ATTN = ("w_qkv", "b_qkv", "w_out", "b_out", "level_logits", "level_offsets")
NUMBERS = ("n_heads", "n_levels", "top_k", "concentration")


@operator(
    name="block",
    reference="plain",
    cases=cases,
    draw=draw,
    outputs=("h", "load_balance", "S", "z", "phases"),
    properties=(
        "forward",
        "gradient",
        "carry",
        "determinism",
        "purity",
        "layout",
        "totality",
        "poison",
        "autocast",
        "memory",
        "identity",
    ),
    tolerance=tolerances.BLOCK,
    differentiable=(
        "h",
        "carry.0",
        "carry.1",
        "parameters.attn.w_*",
        "parameters.attn.b_*",
        "parameters.attn.level_logits",
        "parameters.kuramoto.*",
        "parameters.norm_*",
        "parameters.moe.[UVbsw]*",
    ),
    carry=(("carry.0", "S"), ("carry.1", "z"), ("carry.2", "phases")),
    slices={
        "h": (0,),
        "S": (0, 1),
        "z": (0, 1),
        "phases": (0,),
        "dh": (0,),
        "dcarry.*": (0, 1),
        "dparameters.moe.[UVbw]*": (0,),
    },
    circular=("phases",),
    margin=margin,
    ranges={
        "B": (1, 3),
        "C": (1, 12),
        "H": (1, 3),
        "K": (2, 5),
        "levels": (1, 3),
        "E": (3, 9),
        "F": (1, 8),
        "r": (1, 4),
        "N": (3, 6),
    },
)
def block(arithmetic: Callable[..., Result], parameters: Bundle, h: Tensor, carry: BlockCarry | None = None) -> Result:
    """``h += attn(norm_attn(h))``; ``theta = kuramoto(norm_kur(h))``; ``h += moe(norm_moe(h), theta[:, -1:])``.

    parameters: a bundle of the block's tensors under their state-dict names, ``n_heads``, ``n_levels``, ``top_k``,
    ``concentration`` (kappa/temperature) and the callables ``attention`` and ``moe`` (behind their contracts).
    h (B,C,D); carry (S (B,H,K,K), z (B,H,K), phases (B,any,N)), None for zeros, its phases never read. Returns
    (h (B,C,D), load_balance (), carry) with the carry detached, S and z the mean over levels, phases (B,C,N).
    ``ValueError`` names a wrong shape, dtype, device or a missing entry.
    """
    expect_floating("h", h, "B,C,D")
    B, _, D = h.shape
    for name in (*NUMBERS, "attention", "moe", "kuramoto.omega", *(f"attn.{entry}" for entry in ATTN)):
        if name not in parameters:
            raise ValueError(f"parameters must hold {name!r}; there are {sorted(parameters)}")
    H, N = parameters["n_heads"], parameters["kuramoto.omega"].shape[0]
    if H < 1 or D % H:
        raise ValueError(f"h {tuple(h.shape)} does not split into n_heads={H}")
    expect("parameters.attn.w_qkv", parameters["attn.w_qkv"], (3, D, D), h.dtype, h.device)
    K = D // H
    if carry is None:
        carry = (h.new_zeros(B, H, K, K), h.new_zeros(B, H, K), h.new_zeros(B, 1, N))
    if not isinstance(carry, (tuple, list)) or len(carry) != 3:
        raise ValueError(f"carry must be (S, z, phases) or None, not {type(carry).__name__}")
    S, z, phases = carry
    expect("carry S", S, (B, H, K, K), h.dtype, h.device)
    expect("carry z", z, (B, H, K), h.dtype, h.device)
    expect("carry phases", phases, (B, phases.shape[1] if phases.dim() == 3 else 1, N), h.dtype, h.device)
    return arithmetic(parameters, h, (S, z, phases))


@variant(operator="block", name="plain")
def plain(parameters: Bundle, h: Tensor, carry: BlockCarry) -> Result:
    """Reference: the pure core, every activation kept for backward."""
    return block_core(parameters, h, carry)


@variant(operator="block", name="checkpointed")
def checkpointed(parameters: Bundle, h: Tensor, carry: BlockCarry) -> Result:
    """The pure core under activation checkpointing: backward recomputes it from h and the carry that came in."""
    return recomputed(block_core, parameters, h, carry)


def recomputed(call: Callable[..., Result], parameters: Bundle, h: Tensor, carry: BlockCarry) -> Result:
    """``call`` under activation checkpointing; the carry is read before and written after it, by the caller.

    Nothing inside draws random numbers, so the generators' states are not saved.
    """
    result: Result = checkpoint(call, parameters, h, carry, use_reentrant=False, preserve_rng_state=False)
    return result
