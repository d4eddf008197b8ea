"""The comparison: a variant's error against its budget, per slice, by maximum and by root mean square."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from proofs.worker import Rejection
from registry import Tolerance

TINY = {"float32": 2.0**-126, "float64": 2.0**-1022, "bfloat16_autocast": 2.0**-126}
EPS = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16_autocast": 2.0**-8}


@dataclass(frozen=True)
class Truth:
    """One output (or gradient) as it should be: the float64 oracle, the reference's own error and its dtypes."""

    oracle: torch.Tensor
    reference_error: torch.Tensor
    dtypes: tuple[torch.dtype, ...]

    @property
    def is_exact(self) -> bool:
        """Integers and booleans must be equal."""
        return not self.oracle.dtype.is_floating_point


@dataclass(frozen=True)
class Measured:
    """The worst element of a comparison: its error, the fraction of the budget it uses, and where it is."""

    error: float
    used: float
    index: tuple[int, ...]
    actual: float = math.nan
    expected: float = math.nan


def measure(
    name: str,
    actual: object,
    truth: Truth,
    tolerance: Tolerance,
    dtype: str,
    *,
    keep: tuple[int, ...] = (),
    circular: bool = False,
    grow: float = 1.0,
) -> Measured:
    """Compare one tensor with its truth.

    Raises ``Rejection`` wrong_shape, wrong_dtype or non_finite; a number over its budget is returned with
    ``used > 1`` and judged by the caller.
    """
    tensor = _same_form(name, actual, truth)
    if truth.is_exact or tolerance.exact:
        return _exact(tensor, truth.oracle)
    found, oracle = tensor.double(), truth.oracle
    _same_non_finites(name, found, oracle)
    finite = torch.isfinite(oracle)
    difference = torch.where(finite, found - oracle, 0.0)
    if circular:
        difference = torch.remainder(difference + math.pi, 2 * math.pi) - math.pi
    error, own = difference.abs(), torch.where(finite, truth.reference_error, 0.0)
    scale = torch.where(finite, oracle.abs(), 0.0)
    if error.numel() == 0:
        return Measured(0.0, 0.0, ())
    axes = [axis for axis in range(error.dim()) if axis not in keep]
    c = tolerance.c * grow
    # Below the smallest normal number results round to multiples of a fixed step, not relatively.
    floor = c * TINY[dtype]
    used = torch.maximum(
        _ratio(
            _largest(error, axes), tolerance.k * _largest(own, axes) + c * EPS[dtype] * _largest(scale, axes) + floor
        ),
        _ratio(_rms(error, axes), tolerance.k * _rms(own, axes) + c * EPS[dtype] * _rms(scale, axes) + floor),
    )
    worst = used.expand_as(error).clone()
    flat = int(torch.where(worst == used.max(), error, -1.0).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape)) if error.dim() else ()
    return Measured(float(error[index]), float(used.max()), index, float(found[index]), float(oracle[index]))


def _same_form(name: str, actual: object, truth: Truth) -> torch.Tensor:
    if not isinstance(actual, torch.Tensor):
        raise Rejection("wrong_dtype", f"{name} is a {type(actual).__name__}, not a tensor", where=name)
    if tuple(actual.shape) != tuple(truth.oracle.shape):
        raise Rejection(
            "wrong_shape",
            f"{name} has shape {tuple(actual.shape)}, the reference {tuple(truth.oracle.shape)}",
            where=name,
        )
    if actual.dtype not in truth.dtypes:
        expected = " or ".join(str(d).removeprefix("torch.") for d in truth.dtypes)
        raise Rejection(
            "wrong_dtype", f"{name} is {str(actual.dtype).removeprefix('torch.')}, the reference {expected}", where=name
        )
    return actual.to_dense() if actual.layout is not torch.strided else actual


def _exact(tensor: torch.Tensor, oracle: torch.Tensor) -> Measured:
    wrong = tensor.to(oracle.dtype) != oracle
    if oracle.dtype.is_floating_point:
        wrong &= ~(tensor.isnan() & oracle.isnan())
    if not wrong.any():
        return Measured(0.0, 0.0, ())
    index = tuple(int(i) for i in wrong.nonzero()[0])
    found, expected = float(tensor[index]), float(oracle[index])
    return Measured(abs(found - expected), math.inf, index, found, expected)


def _same_non_finites(name: str, found: torch.Tensor, oracle: torch.Tensor) -> None:
    same = (found.isfinite() & oracle.isfinite()) | (found.isnan() & oracle.isnan()) | (found == oracle)
    if not bool(same.all()):
        index = tuple(int(i) for i in (~same).nonzero()[0]) if found.dim() else ()
        where = f"{name}{list(index)}"
        raise Rejection(
            "non_finite",
            f"{where} is {float(found[index])}, should be {float(oracle[index]):.9g}",
            where=where,
            error=math.inf,
        )


def _largest(value: torch.Tensor, axes: list[int]) -> torch.Tensor:
    return value.amax(dim=axes, keepdim=True) if axes else value


def _rms(value: torch.Tensor, axes: list[int]) -> torch.Tensor:
    # Scaled by the largest element: squares of values near the ends of the range would over- or underflow.
    largest = _largest(value, axes)
    safe = torch.where(largest > 0, largest, 1.0)
    return (value / safe).square().mean(dim=axes, keepdim=True).sqrt() * safe if axes else value


def _ratio(error: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    return torch.where(error == 0, 0.0, error / budget)


def floats(tensors: Iterable[object]) -> list[torch.Tensor]:
    """The floating tensors among leaves."""
    return [t for t in tensors if isinstance(t, torch.Tensor) and t.dtype.is_floating_point]
