"""The phase-routed mixture of experts: the contract, the gathering reference and two other orders of its products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu

from fractus import tolerances
from fractus.contract import expect, expect_floating
from fractus.operators.moe_cases import cases, draw
from fractus.routing import chosen_experts, gate_gap, gates, load_balance
from registry import operator, variant

Experts = Mapping[str, Tensor]
Result = tuple[Tensor, Tensor]


def row_constant_routing(
    hidden: Tensor, phases: Tensor, experts: Experts, top_k: int, concentration: float
) -> str | None:
    """None where all positions of a row share one storage of phases (P = 1, or stride 0); values are not looked at."""
    if phases.shape[1] == 1 or phases.stride(1) == 0:
        return None
    return f"phases {tuple(phases.shape)} with strides {phases.stride()} may differ between positions of a row"


def margin(hidden: Tensor, phases: Tensor, experts: Experts, top_k: int, concentration: float) -> float:
    """The least relative distance of any position's routing to another choice of experts."""
    return gate_gap(phases, experts["expert_phases"], concentration, top_k)


@operator(
    name="moe",
    reference="gather",
    cases=cases,
    draw=draw,
    outputs=("out", "load_balance"),
    properties=(
        "forward",
        "gradient",
        "determinism",
        "purity",
        "layout",
        "totality",
        "poison",
        "autocast",
        "memory",
        "identity",
    ),
    tolerance=tolerances.MOE,
    differentiable=("hidden", "phases", "experts.[UVbsw]*"),
    slices={"out": (0,), "dhidden": (0,), "dexperts.[UVbw]*": (0,)},
    conditions={"row_constant_routing": row_constant_routing},
    margin=margin,
    ranges={"B": (1, 3), "C": (1, 12), "D": (2, 10), "E": (3, 9), "F": (1, 12), "r": (1, 5), "N": (2, 8)},
)
def moe(
    arithmetic: Callable[..., Result],
    hidden: Tensor,
    phases: Tensor,
    experts: Experts,
    top_k: int,
    concentration: float,
) -> Result:
    """``out = sum_k w_k * expert_k(hidden)`` with the top_k von Mises gates of the phases, and the load-balance loss.

    hidden (B,C,D), phases (B,P,N) with P = C or 1, experts under their state-dict names, either ``U1 (E,F,r)
    V1 (E,D,r) U2 (E,D,r) V2 (E,F,r) scale1 scale2 (E,1,1) b1 (E,F) b2 (E,D)`` or ``w1 (E,D,F) b1 w2 (E,F,D) b2``,
    and ``expert_phases (E)``; 1 <= top_k <= E; concentration = kappa/temperature > 0. All of one floating dtype.
    Low-rank expert: ``a = gelu_tanh(scale1*((h V1) U1^T) + b1)``, ``scale2*((a V2) U2^T) + b2``; dense:
    ``gelu_tanh(h w1 + b1) w2 + b2``. Returns out (B,C,D) and ``E * sum_e (P_e - 1/E)^2`` (), P the mean full gate.
    ``ValueError`` names a wrong shape, dtype, device or number.
    """
    expect_floating("hidden", hidden, "B,C,D")
    expect_floating("phases", phases, "B,P,N")
    B, C, D = hidden.shape
    positions = phases.shape[1]
    if positions not in (1, C):
        raise ValueError(
            f"phases must have 1 or {C} positions as hidden {tuple(hidden.shape)}, not {tuple(phases.shape)}"
        )
    expect("phases", phases, (B, positions, phases.shape[2]), hidden.dtype, hidden.device)
    check_experts(experts, D, hidden.dtype, hidden.device)
    n_experts = experts["expert_phases"].shape[0]
    if not 1 <= top_k <= n_experts:
        raise ValueError(f"top_k must lie in 1..{n_experts}, not {top_k}")
    if not concentration > 0:
        raise ValueError(f"concentration must be above 0, not {concentration}")
    return arithmetic(hidden, phases, experts, top_k, concentration)


def check_experts(experts: Experts, D: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``ValueError`` unless the experts' tensors are complete and fit each other and d_model D."""
    names = {"w1", "b1", "w2", "b2"} if "w1" in experts else {"U1", "V1", "U2", "V2", "scale1", "scale2", "b1", "b2"}
    if set(experts) != names | {"expert_phases"}:
        raise ValueError(f"experts must be {sorted(names | {'expert_phases'})}, not {sorted(experts)}")
    E, F = experts["b1"].shape
    r = experts["U1"].shape[-1] if "U1" in experts else 0
    shapes = {
        "U1": (E, F, r),
        "V1": (E, D, r),
        "U2": (E, D, r),
        "V2": (E, F, r),
        "scale1": (E, 1, 1),
        "scale2": (E, 1, 1),
    }
    shapes |= {"w1": (E, D, F), "w2": (E, F, D), "b1": (E, F), "b2": (E, D), "expert_phases": (E,)}
    for name, tensor in experts.items():
        expect(f"experts.{name}", tensor, shapes[name], dtype, device)


def mixed(outputs: Tensor, weights: Tensor) -> Tensor:
    """Sum over the chosen experts: outputs (...,k,D), weights (...,k) -> (...,D)."""
    return (outputs * weights.unsqueeze(-1)).sum(-2)


@variant(operator="moe", name="gather")
def gather(hidden: Tensor, phases: Tensor, experts: Experts, top_k: int, concentration: float) -> Result:
    """Reference: every token gathers the weights of its own top_k experts, as the original does."""
    B, C, _D = hidden.shape
    full = gates(phases.expand(B, C, -1), experts["expert_phases"], concentration)
    weights, ids = chosen_experts(full, top_k)
    if "w1" in experts:
        inner = torch.einsum("bcd,bckdf->bckf", hidden, experts["w1"][ids])
        active = gelu(inner + experts["b1"][ids], approximate="tanh")
        outputs = torch.einsum("bckf,bckfd->bckd", active, experts["w2"][ids]) + experts["b2"][ids]
        return mixed(outputs, weights).to(hidden.dtype), load_balance(full)
    scale1, scale2 = experts["scale1"][ids].squeeze(-1), experts["scale2"][ids].squeeze(-1)
    inner = torch.einsum("bcd,bckdr->bckr", hidden, experts["V1"][ids])
    inner = torch.einsum("bckr,bckfr->bckf", inner, experts["U1"][ids])
    active = gelu(scale1 * inner + experts["b1"][ids], approximate="tanh")
    outer = torch.einsum("bckf,bckfr->bckr", active, experts["V2"][ids])
    outer = torch.einsum("bckr,bckdr->bckd", outer, experts["U2"][ids])
    outputs = scale2 * outer + experts["b2"][ids]
    return mixed(outputs, weights).to(hidden.dtype), load_balance(full)


def apply_experts(x: Tensor, experts: Experts) -> Tensor:
    """Every expert of the bundle on its own rows: x (..., n, C, D), tensors (..., n, ...) -> (..., n, C, D)."""
    b1, b2 = experts["b1"].unsqueeze(-2), experts["b2"].unsqueeze(-2)
    if "w1" in experts:
        return gelu(x @ experts["w1"] + b1, approximate="tanh") @ experts["w2"] + b2
    inner = (x @ experts["V1"]) @ experts["U1"].transpose(-1, -2)
    active = gelu(experts["scale1"] * inner + b1, approximate="tanh")
    return experts["scale2"] * ((active @ experts["V2"]) @ experts["U2"].transpose(-1, -2)) + b2


@variant(operator="moe", name="dense")
def dense(hidden: Tensor, phases: Tensor, experts: Experts, top_k: int, concentration: float) -> Result:
    """All experts on all tokens, mixed with the chosen gates and zeros; E/top_k times the operations, no gather."""
    B, C, D = hidden.shape
    full = gates(phases.expand(B, C, -1), experts["expert_phases"], concentration)
    weights, ids = chosen_experts(full, top_k)
    every = apply_experts(hidden.reshape(1, B * C, D), experts)
    spread = torch.zeros_like(full).scatter(-1, ids, weights).reshape(B * C, -1)
    out = torch.einsum("tn,ntd->td", spread, every.to(hidden.dtype))
    return out.reshape(B, C, D).to(hidden.dtype), load_balance(full)


@variant(operator="moe", name="row_batched", conditions=("row_constant_routing",))
def row_batched(hidden: Tensor, phases: Tensor, experts: Experts, top_k: int, concentration: float) -> Result:
    """Routing constant in a row: its top_k experts, gathered once, meet all its tokens in batched matmuls."""
    B, _C, _ = hidden.shape
    full = gates(phases, experts["expert_phases"], concentration)
    # Gates of every position given (one, or C over one storage): each keeps its own gradient; the choice is the row's.
    _, ids = chosen_experts(full[:, 0], top_k)
    weights, _ = chosen_experts(full, top_k)
    flat = ids.reshape(-1)
    chosen = {name: gathered(tensor, flat, B) for name, tensor in experts.items() if name != "expert_phases"}
    outputs = apply_experts(hidden.unsqueeze(1), chosen)
    return (outputs * weights.transpose(1, 2).unsqueeze(-1)).sum(1).to(hidden.dtype), load_balance(full)


def gathered(tensor: Tensor, flat: Tensor, rows: int) -> Tensor:
    """(E, ...) at ids (rows*k,) -> (rows, k, ...)."""
    return SelectedRows.apply(tensor, flat).reshape(rows, -1, *tensor.shape[1:])


class SelectedRows(torch.autograd.Function):
    """``tensor[ids]`` whose gradient touches the selected rows only: the rest is memory never written."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = tensor.shape
        return tensor.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return untouched_zeros(ctx.shape, grad).index_add_(0, ids, grad), None


def untouched_zeros(shape: torch.Size, like: Tensor) -> Tensor:
    """Zeros of ``like``'s dtype and device; on a CPU from calloc, so that pages nobody writes are never made."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    raw = np.zeros(math.prod(shape) * like.element_size(), dtype=np.uint8)
    return torch.from_numpy(raw).view(like.dtype).view(shape)
