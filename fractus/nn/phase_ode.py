"""The Kuramoto clock as a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fractus.kuramoto import rk4_step, start_phases


class KuramotoLayer(nn.Module):
    """Phases of ``n_oscillators`` oscillators, coupled with rank ``rank``, from the mean of the hidden state.

    ``ValueError`` for sizes below 1 and dt <= 0.
    """

    def __init__(
        self, d_model: int, n_oscillators: int, rank: int, n_steps: int = 4, dt: float = 0.1, damping: float = 0.01
    ) -> None:
        super().__init__()
        if min(d_model, n_oscillators, rank, n_steps) < 1 or not dt > 0:
            raise ValueError(
                f"d_model, n_oscillators, rank and n_steps must be at least 1 and dt above 0, "
                f"not {d_model}, {n_oscillators}, {rank}, {n_steps} and {dt}"
            )
        self.n_oscillators, self.n_steps, self.dt, self.damping = n_oscillators, n_steps, dt, damping
        self.omega = nn.Parameter(torch.empty(n_oscillators).uniform_(-0.05, 0.05))
        self.coupling_u = nn.Parameter(torch.empty(n_oscillators, rank).uniform_(-1.0, 1.0))
        self.coupling_lambda = nn.Parameter(torch.empty(rank).uniform_(0.01, 0.51))

    def _encode_from_hidden(self, hidden: Tensor) -> Tensor:
        """Start phases of hidden (B,L,D) -> (B,L,N)."""
        return start_phases(hidden.to(self.omega.dtype), self.n_oscillators)

    def _rk4_integrate(self, theta: Tensor) -> Tensor:
        """``n_steps`` Runge-Kutta steps of (B,L,N), wrapped after each."""
        for _ in range(self.n_steps):
            theta = rk4_step(theta, self.omega, self.coupling_u, self.coupling_lambda, self.dt, self.damping)
        return theta

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (B,L,D) -> phases (B,L,N) in the parameters' dtype even under autocast."""
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            return self._rk4_integrate(self._encode_from_hidden(hidden))
