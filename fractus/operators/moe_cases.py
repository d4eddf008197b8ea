"""The mixture's cases: both kinds of expert; routing one for a row, repeated over it, or different at each position."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fractus.draw import glorot, normal, uniform
from fractus.kuramoto import TWO_PI
from fractus.nn.farey import expert_phases
from registry import Bundle, Case

KAPPA = 4.0
PRODUCTION_TEMPERATURE = 2.5


def cases() -> tuple[Case, ...]:
    """``values`` says where the phases come from (one, repeated, varying) and how large the numbers are."""
    small = {"B": 2, "C": 6, "D": 8, "E": 6, "F": 10, "r": 3, "k": 2, "N": 5}
    return (
        Case(name="small", kind="small", sizes=small, values="one"),
        Case(name="repeated", kind="small", sizes=small, values="repeated"),
        Case(name="varying", kind="small", sizes=small, values="varying"),
        Case(name="dense_experts", kind="small", sizes={**small, "r": 0}, values="one"),
        Case(name="dense_experts_varying", kind="small", sizes={**small, "r": 0}, values="varying"),
        Case(
            name="ragged",
            kind="ragged",
            sizes={**small, "B": 3, "C": 13, "D": 7, "E": 9, "F": 5, "k": 3},
            values="repeated",
        ),
        Case(name="ragged_varying", kind="ragged", sizes={**small, "C": 11, "D": 5, "E": 12, "N": 8}, values="varying"),
        Case(name="one_token", kind="edge", sizes={**small, "B": 1, "C": 1}, values="one"),
        Case(name="all_experts", kind="edge", sizes={**small, "E": 3, "k": 3}, values="varying"),
        Case(name="one_expert", kind="edge", sizes={**small, "E": 1, "k": 1}, values="one"),
        Case(name="large", kind="extreme", sizes=small, values="large"),
        Case(
            name="real_1b",
            kind="real",
            sizes={"B": 2, "C": 128, "D": 1280, "E": 128, "F": 2048, "r": 64, "k": 2, "N": 16},
            values="one",
        ),
    )


def draw(case: Case, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor | Bundle | int | float]:
    """hidden (B,C,D), phases (B,P,N) bunched enough to have a mean, experts with gains and biases away from 1 and 0."""
    sizes = case.sizes
    B, C, N = sizes["B"], sizes["C"], sizes["N"]
    hidden = normal(generator, dtype, B, C, sizes["D"], mean=0.2)
    positions = C if case.values == "varying" else 1
    centre = uniform(generator, dtype, B, positions, 1, high=TWO_PI)
    phases = torch.remainder(centre + normal(generator, dtype, B, positions, N, std=0.5), TWO_PI)
    if case.values == "repeated":
        phases = phases.expand(B, C, N)
    if case.values == "large":
        hidden = hidden * 1e12
    return {
        "hidden": hidden,
        "phases": phases,
        "experts": Bundle(draw_experts(sizes, generator, dtype)),
        "top_k": sizes["k"],
        "concentration": KAPPA / PRODUCTION_TEMPERATURE,
    }


def draw_experts(sizes: Mapping[str, int], generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """The experts' tensors under their state-dict names; rank r = 0 makes dense ones."""
    D, E, F, r = sizes["D"], sizes["E"], sizes["F"], sizes["r"]
    biases = {"b1": normal(generator, dtype, E, F, std=0.3), "b2": normal(generator, dtype, E, D, std=0.3)}
    angles = {"expert_phases": torch.tensor(expert_phases(E), dtype=torch.float32).to(dtype)}
    if r == 0:
        weights = {"w1": glorot(generator, dtype, E, D, F) * 2.0, "w2": glorot(generator, dtype, E, F, D) * 2.0}
        return weights | biases | angles
    shapes = {"U1": (E, F, r), "V1": (E, D, r), "U2": (E, D, r), "V2": (E, F, r)}
    factors = {name: glorot(generator, dtype, *shape) * 2.0 for name, shape in shapes.items()}
    scales = {name: uniform(generator, dtype, E, 1, 1, low=0.5, high=1.5) for name in ("scale1", "scale2")}
    return factors | scales | biases | angles
