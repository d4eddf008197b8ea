"""Phase routing: from oscillator phases to expert gates, the chosen experts and the load-balance loss."""

from __future__ import annotations

import torch
from torch import Tensor

from fractus.nn.stats import normalise, stable_softmax


def gates(phases: Tensor, expert_phases: Tensor, concentration: float) -> Tensor:
    """Von Mises gates ``g_e ~ exp(concentration * cos(mean - phi_e))``, normalised over experts.

    ``mean = atan2(sum sin, sum cos)`` over oscillators. phases (..., N), expert_phases (E) -> (..., E), in the
    phases' dtype even under autocast: near a tie of two gates a rounding would route elsewhere.
    """
    with torch.autocast(device_type=phases.device.type, enabled=False):
        mean = torch.atan2(torch.sin(phases).sum(-1), torch.cos(phases).sum(-1))
        return stable_softmax(concentration * torch.cos(mean.unsqueeze(-1) - expert_phases.to(phases.dtype)))


def load_balance(full: Tensor) -> Tensor:
    """``E * sum_e (P_e - 1/E)^2`` with P the mean of the full gates (B, P, E) over rows and positions -> ()."""
    n_experts = full.shape[-1]
    share = full.reshape(-1, n_experts).mean(0)
    return n_experts * ((share - 1.0 / n_experts) ** 2).sum()


def chosen_experts(full: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The top_k gates of (..., E), renormalised (uniform if their sum is <= 1e-10): weights and ids (..., top_k)."""
    values, ids = full.topk(top_k, dim=-1)
    return normalise(values), ids


def gate_gap(phases: Tensor, expert_phases: Tensor, concentration: float, top_k: int) -> float:
    """Relative distance of the routing to a change: the least gap of gate k to gate k+1, or the least coherence.

    Coherence is ``|sum exp(i*theta)| / N``: at 0 the mean phase is undefined. With top_k = E only it counts.
    """
    points = phases.double()
    coherence = torch.hypot(torch.sin(points).mean(-1), torch.cos(points).mean(-1)).min().item()
    full = gates(points, expert_phases.double(), concentration)
    if top_k >= full.shape[-1]:
        return coherence
    best = full.topk(top_k + 1, dim=-1).values
    gap = (1.0 - best[..., top_k] / best[..., top_k - 1]).min().item()
    return min(gap, coherence)
