"""How much of each suite a profile measures: sizes, rounds of processes and seconds a cell, all in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Sizes = Mapping[str, int]

ENGINE_1B = {
    "vocab_size": 50257, "d_model": 1280, "n_layers": 16, "n_heads": 20, "d_head": 64, "n_levels": 2,
    "n_oscillators": 16, "coupling_rank": 8, "n_experts": 128, "top_k": 2, "expert_d_ff": 2048, "siren_rank": 64,
}  # fmt: skip
# bench_engine of the seeds: d=128, 2 blocks, E8.
ENGINE_SMALL = {
    **ENGINE_1B, "d_model": 128, "n_layers": 2, "n_heads": 2, "n_experts": 8, "expert_d_ff": 256, "siren_rank": 32,
}  # fmt: skip
ENGINE_TINY = {
    **ENGINE_SMALL,
    "vocab_size": 512,
    "d_model": 64,
    "n_heads": 4,
    "d_head": 16,
    "expert_d_ff": 64,
    "siren_rank": 8,
}
# The breakdown of the seeds: d=512, 4 blocks, 16 experts.
ENGINE_PROFILE = {
    **ENGINE_1B,
    "d_model": 512,
    "n_layers": 4,
    "n_heads": 8,
    "n_experts": 16,
    "expert_d_ff": 1024,
    "siren_rank": 32,
}

MOE_1B = {"C": 128, "D": 1280, "E": 128, "F": 2048, "r": 64, "k": 2, "N": 16}
MOE_TINY = {"C": 64, "D": 128, "E": 16, "F": 256, "r": 16, "k": 2, "N": 16}
BLOCK_1B = {"C": 128, "H": 20, "K": 64, "levels": 2, "E": 128, "F": 2048, "r": 64, "k": 2, "N": 16, "rank": 8}
BLOCK_TINY = {"C": 64, "H": 4, "K": 32, "levels": 2, "E": 8, "F": 128, "r": 16, "k": 2, "N": 16, "rank": 8}
SHARD_TOKENS = 429_896_462


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One table of an operator's suite: its case, sizes, values of the draw, modes, rounds, and turns of its own."""

    case: str
    axes: Sizes
    rounds: int
    modes: tuple[str, ...] = ("forward", "forward_backward")
    values: str = "normal"
    turns: int | None = None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a run measures; a cell is timed in ``turns`` that take ``budget_s`` together, or one call each if longer."""

    name: str
    budget_s: float
    turns: int
    limit_s: float
    operators: Mapping[str, tuple[Shape, ...]]
    fetch_tokens: int
    fetch_processes: tuple[int, ...]
    engine: Sizes
    engine_axes: Sizes
    engine_steps: int
    engine_rounds: int
    breakdown: Sizes
    breakdown_axes: Sizes
    scaling: tuple[int, ...] = (1, 2, 4, 8)
    small_rounds: int = 1
    trainer_steps: int = 12
    engine_1b: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def attention(B: int, rounds: int, turns: int | None = None) -> Shape:
    """B rows at the 1B shape, G = 40 B groups, carry active."""
    return Shape(case="real_1b", axes={"B": B, "G": 40 * B, "C": 128, "K": 64}, rounds=rounds, turns=turns)


def head(N: int, rounds: int, modes: tuple[str, ...], turns: int | None = None) -> Shape:
    """N rows of the 1B head."""
    return Shape(case="real_1b", axes={"N": N, "D": 1280, "V": 50257}, rounds=rounds, modes=modes, turns=turns)


def experts(B: int, rounds: int, turns: int | None = None) -> Shape:
    """B rows of the 1B mixture, one phase for all tokens of a row."""
    return Shape(case="real_1b", axes={"B": B, **MOE_1B}, rounds=rounds, values="one", turns=turns)


def block(B: int, rounds: int, modes: tuple[str, ...], turns: int | None = None) -> Shape:
    """B rows through a 1B block."""
    return Shape(case="real_1b", axes={"B": B, **BLOCK_1B}, rounds=rounds, modes=modes, turns=turns)


BOTH, FORWARD, TRAINING, STEP = ("forward", "forward_backward"), ("forward",), ("forward_backward",), ("step",)

QUICK = Profile(
    name="quick",
    budget_s=0.15,
    turns=8,
    limit_s=90,
    operators={
        "attention": (
            Shape(case="quick", axes={"B": 1, "G": 4, "C": 128, "K": 64}, rounds=5, modes=FORWARD),
            Shape(case="quick", axes={"B": 1, "G": 4, "C": 128, "K": 64}, rounds=4, modes=TRAINING, turns=4),
        ),
        "cross_entropy": (Shape(case="quick", axes={"N": 128, "D": 128, "V": 4096}, rounds=5),),
        "moe": (Shape(case="quick", axes={"B": 2, **MOE_TINY}, rounds=2, values="one"),),
        "sampler": (Shape(case="quick", axes={"N": 128, "D": 128, "V": 4096}, rounds=2, modes=FORWARD),),
        "block": (Shape(case="quick", axes={"B": 2, **BLOCK_TINY}, rounds=1, modes=TRAINING),),
        "optimizer_step": (Shape(case="quick", axes={"rows": 4096, "D": 128, "tensors": 2}, rounds=2, modes=STEP),),
    },
    fetch_tokens=4_000_000,
    fetch_processes=(1, 2),
    engine=ENGINE_TINY,
    engine_axes={"B": 4, "C": 64},
    engine_steps=5,
    engine_rounds=1,
    breakdown=ENGINE_TINY,
    breakdown_axes={"B": 4, "C": 32},
    scaling=(1, 4),
    trainer_steps=6,
)

STANDARD = Profile(
    name="standard",
    budget_s=0.3,
    turns=3,
    limit_s=300,
    operators={
        "attention": (attention(2, 1, 4), attention(4, 1, 3), attention(8, 1, 1)),
        "cross_entropy": (head(256, 1, BOTH),),
        "moe": (experts(2, 1, 2),),
        "sampler": (head(256, 1, FORWARD),),
        "block": (block(1, 1, TRAINING),),
        "optimizer_step": (Shape(case="real_1b", axes={"rows": 50257, "D": 1280, "tensors": 2}, rounds=1, modes=STEP),),
    },
    fetch_tokens=SHARD_TOKENS,
    fetch_processes=(1, 8),
    engine=ENGINE_SMALL,
    engine_axes={"B": 8, "C": 128},
    engine_steps=4,
    engine_rounds=1,
    breakdown=ENGINE_PROFILE,
    breakdown_axes={"B": 1, "C": 32},
    trainer_steps=5,
    engine_1b={"production": (1,)},
)

FULL = Profile(
    name="full",
    budget_s=1.0,
    turns=8,
    limit_s=1800,
    operators={
        "attention": (attention(2, 2, 6), attention(4, 2, 6), attention(8, 1, 5)),
        "cross_entropy": (head(256, 3, BOTH), head(1024, 1, BOTH, 4)),
        "moe": (experts(2, 2), experts(4, 1, 4)),
        "sampler": (head(256, 2, FORWARD), head(1024, 1, FORWARD, 3)),
        "block": (block(1, 2, BOTH), block(4, 1, BOTH, 4)),
        "optimizer_step": (Shape(case="real_1b", axes={"rows": 50257, "D": 1280, "tensors": 2}, rounds=2, modes=STEP),),
    },
    fetch_tokens=SHARD_TOKENS,
    fetch_processes=(1, 8),
    engine=ENGINE_SMALL,
    engine_axes={"B": 8, "C": 128},
    engine_steps=20,
    engine_rounds=1,
    breakdown=ENGINE_PROFILE,
    breakdown_axes={"B": 1, "C": 32},
    trainer_steps=20,
    # The reference at the batch of a small pod too: where it does not fit, its row says so.
    engine_1b={"production": (1, 2, 4, 8), "reference": (1, 4)},
)

PROFILES = {profile.name: profile for profile in (QUICK, STANDARD, FULL)}
