"""The comparison: a variant's error against its budget, per slice, by maximum and by root mean square."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import EllipsisType

import torch

from proofs.worker import Rejection
from registry import Tolerance

BLOCK_ELEMENTS = 1 << 20
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
    if tensor.numel() == 0:
        return Measured(0.0, 0.0, ())
    parts = [_part(name, tensor[rows], truth, rows, keep, circular) for rows in blocks(tensor)]
    joined = {field: torch.cat([part[field] for part in parts]) for field in parts[0]}
    if 0 not in keep:
        joined = {field: _joined(field, value, parts) for field, value in joined.items()}
    c = tolerance.c * grow
    # Below the smallest normal number results round to multiples of a fixed step, not relatively.
    floor = c * TINY[dtype]
    used = torch.maximum(
        _ratio(joined["error"], tolerance.k * joined["own"] + c * EPS[dtype] * joined["scale"] + floor),
        _ratio(joined["error_rms"], tolerance.k * joined["own_rms"] + c * EPS[dtype] * joined["scale_rms"] + floor),
    )
    return _worst(tensor, truth, used, keep, circular)


def blocks(tensor: torch.Tensor) -> list[slice | EllipsisType]:
    """Rows of the first axis in blocks that stay in the cache; a small tensor whole."""
    if tensor.numel() <= BLOCK_ELEMENTS or tensor.dim() == 0:
        return [...]
    rows = max(1, BLOCK_ELEMENTS * tensor.shape[0] // tensor.numel())
    return [slice(start, start + rows) for start in range(0, tensor.shape[0], rows)]


def _difference(found: torch.Tensor, oracle: torch.Tensor, circular: bool) -> torch.Tensor:
    difference = torch.where(torch.isfinite(oracle), found - oracle, 0.0)
    if circular:
        difference = torch.remainder(difference + math.pi, 2 * math.pi) - math.pi
    return difference.abs()


def _part(
    name: str, actual: torch.Tensor, truth: Truth, rows: slice | EllipsisType, keep: tuple[int, ...], circular: bool
) -> dict[str, torch.Tensor]:
    """Largest and root mean square of error, reference's error and scale in one block, slice by slice (dim 0 of 1)."""
    found, oracle = actual.double(), truth.oracle[rows]
    _same_non_finites(name, found, oracle, rows)
    finite = torch.isfinite(oracle)
    values = {
        "error": _difference(found, oracle, circular),
        "own": torch.where(finite, truth.reference_error[rows].double(), 0.0),
        "scale": torch.where(finite, oracle.abs(), 0.0),
    }
    axes = [axis for axis in range(oracle.dim()) if axis not in keep]
    reduced = {field: _largest(value, axes) for field, value in values.items()}
    reduced |= {f"{field}_rms": _rms(value, axes) for field, value in values.items()}
    found_parts = {field: value.reshape(1) if value.dim() == 0 else value for field, value in reduced.items()}
    return {**found_parts, "rows": torch.full_like(found_parts["error"], float(oracle.shape[0] if oracle.dim() else 1))}


def _joined(field: str, value: torch.Tensor, parts: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Blocks of one slice put together: the largest, or the mean square weighted by rows."""
    if not field.endswith("_rms"):
        return value.amax(0, keepdim=True)
    weight = torch.cat([part["rows"] for part in parts])
    largest = value.amax(0, keepdim=True)
    safe = torch.where(largest > 0, largest, 1.0)
    return ((value / safe).square() * weight / weight.sum(0, keepdim=True)).sum(0, keepdim=True).sqrt() * safe


def _worst(tensor: torch.Tensor, truth: Truth, used: torch.Tensor, keep: tuple[int, ...], circular: bool) -> Measured:
    """The element with the largest error in the slice that uses most of its budget."""
    where = torch.unravel_index(used.argmax(), used.shape)
    start = [int(i) for i in where] if tensor.dim() else []
    at = tuple(start[axis] if axis in keep else slice(None) for axis in range(tensor.dim()))
    found, oracle = tensor[at].double(), truth.oracle[at]
    error = _difference(found, oracle, circular)
    inner = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)] if error.dim() else []
    index = tuple(start[axis] if axis in keep else inner.pop(0) for axis in range(tensor.dim()))
    flat = tuple(index)
    return Measured(
        float(_difference(tensor[flat].double(), truth.oracle[flat], circular)),
        float(used.max()),
        index,
        float(tensor[flat]),
        float(truth.oracle[flat]),
    )


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


def _same_non_finites(name: str, found: torch.Tensor, oracle: torch.Tensor, rows: slice | EllipsisType) -> None:
    same = (found.isfinite() & oracle.isfinite()) | (found.isnan() & oracle.isnan()) | (found == oracle)
    if not bool(same.all()):
        index = tuple(int(i) for i in (~same).nonzero()[0]) if found.dim() else ()
        place = list(index)
        if place and isinstance(rows, slice):
            place[0] += int(rows.start)
        where = f"{name}{place}"
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
