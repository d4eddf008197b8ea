"""The phase-routed mixture of experts as a layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fractus.nn.farey import expert_phases
from fractus.operators.moe import gather, moe
from fractus.routing import gates
from registry.tree import Bundle

LOW_RANK = ("U1", "V1", "U2", "V2")


class PhaseRoutedMoE(nn.Module):
    """``n_experts`` experts routed by von Mises gates of the phases; low-rank ones, or dense for expert_rank None or 0.

    ``temperature`` is a plain attribute that is not saved: 1.0 by construction, 2.5 in production, set from outside.
    ``ValueError`` for sizes out of range.
    """

    expert_phases: Tensor

    def __init__(
        self,
        d_model: int,
        n_experts: int,
        top_k: int,
        kappa: float = 4.0,
        temperature: float = 1.0,
        d_ff: int = 64,
        expert_rank: int | None = None,
    ) -> None:
        super().__init__()
        rank = expert_rank or 0
        if min(d_model, n_experts, d_ff) < 1 or rank < 0:
            raise ValueError(
                f"d_model, n_experts, d_ff must be >= 1, expert_rank >= 0: {d_model}, {n_experts}, {d_ff}, {rank}"
            )
        if not 1 <= top_k <= n_experts:
            raise ValueError(f"top_k must lie in 1..n_experts={n_experts}, not {top_k}")
        if not (kappa > 0 and temperature > 0):
            raise ValueError(f"kappa and temperature must be above 0, not {kappa} and {temperature}")
        self.n_experts, self.top_k, self.kappa, self.temperature = n_experts, top_k, kappa, temperature
        if rank:
            for name, rows in zip(LOW_RANK, (d_ff, d_model, d_model, d_ff), strict=True):
                self._add(name, (n_experts, rows, rank), math.sqrt(2.0 / (rows + rank)))
            self.scale1 = nn.Parameter(torch.ones(n_experts, 1, 1))
            self.scale2 = nn.Parameter(torch.ones(n_experts, 1, 1))
        else:
            self._add("w1", (n_experts, d_model, d_ff), math.sqrt(2.0 / d_model))
        self.b1 = nn.Parameter(torch.zeros(n_experts, d_ff))
        if not rank:
            self._add("w2", (n_experts, d_ff, d_model), math.sqrt(2.0 / d_ff))
        self.b2 = nn.Parameter(torch.zeros(n_experts, d_model))
        angles = torch.tensor(expert_phases(n_experts), dtype=torch.float32)
        self.register_buffer("expert_phases", angles.to(torch.get_default_dtype()))

    def _add(self, name: str, shape: tuple[int, ...], limit: float) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(shape).uniform_(-limit, limit)))

    @property
    def concentration(self) -> float:
        """kappa / temperature; ``ValueError`` when the temperature was set to 0 or below."""
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}")
        return self.kappa / self.temperature

    def tensors(self) -> Bundle:
        """Parameters and buffers under their state-dict names."""
        return Bundle({**self._parameters, **self._buffers})

    def _compute_gates(self, phases: Tensor) -> Tensor:
        """All gates of phases (B,L,N) -> (B,L,E)."""
        return gates(phases, self.expert_phases, self.concentration)

    def forward(self, h: Tensor, phases: Tensor) -> tuple[Tensor, Tensor]:
        """h (B,L,D), phases (B,L or 1,N) -> (out (B,L,D), load-balance loss ())."""
        return moe(gather, h, phases, self.tensors(), self.top_k, self.concentration)
