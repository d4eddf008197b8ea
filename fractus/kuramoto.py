"""The Kuramoto clock: start phases from the hidden state and one Runge-Kutta step of low-rank coupled oscillators."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TWO_PI = 2.0 * math.pi


def wrap(phases: Tensor) -> Tensor:
    """Phases modulo 2*pi, in [0, 2*pi) up to rounding; the derivative is 1."""
    return torch.remainder(phases, TWO_PI)


def unwrapped_start(hidden: Tensor, n_oscillators: int) -> Tensor:
    """``2*pi*mean_D(h) + 2*pi*i/N`` before the wrap: (B, C, D) -> (B, C, N)."""
    index = torch.arange(n_oscillators, dtype=hidden.dtype, device=hidden.device)
    return TWO_PI * hidden.mean(-1, keepdim=True) + TWO_PI * index / n_oscillators


def start_phases(hidden: Tensor, n_oscillators: int) -> Tensor:
    """Start phases ``(2*pi*mean_D(h) + 2*pi*i/N) mod 2*pi``: (B, C, D) -> (B, C, N)."""
    return wrap(unwrapped_start(hidden, n_oscillators))


def velocity(theta: Tensor, omega: Tensor, coupling_u: Tensor, coupling_lambda: Tensor, damping: float) -> Tensor:
    """``omega - damping*theta + cos*U(lambda*U^T sin) - sin*U(lambda*U^T cos)``: (..., N) -> (..., N)."""
    sine, cosine = torch.sin(theta), torch.cos(theta)
    from_sine = ((sine @ coupling_u) * coupling_lambda) @ coupling_u.T
    from_cosine = ((cosine @ coupling_u) * coupling_lambda) @ coupling_u.T
    return omega - damping * theta + cosine * from_sine - sine * from_cosine


def rk4_step(
    theta: Tensor, omega: Tensor, coupling_u: Tensor, coupling_lambda: Tensor, dt: float = 0.1, damping: float = 0.01
) -> Tensor:
    """One classical Runge-Kutta step of ``velocity``, wrapped after it, not inside its stages: (..., N)."""
    k1 = velocity(theta, omega, coupling_u, coupling_lambda, damping)
    k2 = velocity(theta + 0.5 * dt * k1, omega, coupling_u, coupling_lambda, damping)
    k3 = velocity(theta + 0.5 * dt * k2, omega, coupling_u, coupling_lambda, damping)
    k4 = velocity(theta + dt * k3, omega, coupling_u, coupling_lambda, damping)
    return wrap(theta + (dt / 6.0) * (k1 + 2.0 * k2 + 2.0 * k3 + k4))
