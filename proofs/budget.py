"""The comparison: a variant's error against its budget, per slice, by maximum and by root mean square."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from types import EllipsisType

import numpy as np
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
    _parts: dict[Hashable, dict[str, torch.Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def part(self, rows: slice | EllipsisType, axes: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """Largest and root mean square of the reference's error and of the values in one block, kept for next time."""
        key = ((rows.start, rows.stop) if isinstance(rows, slice) else None, axes)
        if key not in self._parts:
            oracle = self.oracle[rows]
            finite = torch.isfinite(oracle)
            values = {
                "own": torch.where(finite, self.reference_error[rows].double(), 0.0),
                "scale": torch.where(finite, oracle.abs(), 0.0),
            }
            self._parts[key] = {"finite": finite.all(), **_reduced(values, axes)}
        return self._parts[key]

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
    places = blocks(tensor)
    parts = [_part(name, tensor[rows], truth, rows, keep, circular) for rows in places]
    joined = {label: torch.cat([part[label] for part in parts]) for label in parts[0]}
    if 0 not in keep and len(places) > 1:
        joined = {label: _joined(label, value, parts) for label, value in joined.items()}
    c = tolerance.c * grow
    # Below the smallest normal number results round to multiples of a fixed step, not relatively.
    floor = c * TINY[dtype]
    used = torch.maximum(
        _ratio(joined["error"], tolerance.k * joined["own"] + c * EPS[dtype] * joined["scale"] + floor),
        _ratio(joined["error_rms"], tolerance.k * joined["own_rms"] + c * EPS[dtype] * joined["scale_rms"] + floor),
    )
    where = _place(used) if tensor.dim() else ()
    rows: slice | EllipsisType = ...
    if len(places) > 1 and 0 not in keep:  # only the block with that slice's largest error is looked through
        rows = places[int(torch.stack([part["error"][where] for part in parts]).argmax())]
    return _worst(tensor, truth, float(used.max()), where, rows, keep, circular)


def blocks(tensor: torch.Tensor) -> list[slice | EllipsisType]:
    """Rows of the first axis in blocks that stay in the cache; a small tensor whole."""
    if tensor.numel() <= BLOCK_ELEMENTS or tensor.dim() == 0:
        return [...]
    rows = max(1, BLOCK_ELEMENTS * tensor.shape[0] // tensor.numel())
    return [slice(start, start + rows) for start in range(0, tensor.shape[0], rows)]


def _difference(found: torch.Tensor, oracle: torch.Tensor, circular: bool, finite: bool = False) -> torch.Tensor:
    difference = found - oracle
    if not finite:
        difference = torch.where(torch.isfinite(oracle), difference, 0.0)
    if circular:
        difference = torch.remainder(difference + math.pi, 2 * math.pi) - math.pi
    return difference.abs()


def _part(
    name: str, actual: torch.Tensor, truth: Truth, rows: slice | EllipsisType, keep: tuple[int, ...], circular: bool
) -> dict[str, torch.Tensor]:
    """Largest and root mean square of error, reference's error and scale in one block, slice by slice (dim 0 of 1)."""
    found, oracle = actual.double(), truth.oracle[rows]
    axes = tuple(axis for axis in range(oracle.dim()) if axis not in keep)
    known = truth.part(rows, axes)
    finite = bool(known["finite"])
    if not (finite and bool(found.isfinite().all())):
        _same_non_finites(name, found, oracle, rows)
    parts = {**_reduced({"error": _difference(found, oracle, circular, finite)}, axes), **known}
    del parts["finite"]
    return {**parts, "rows": torch.full_like(parts["error"], float(oracle.shape[0] if oracle.dim() else 1))}


def _reduced(values: dict[str, torch.Tensor], axes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in values.items():
        largest = value.amax(dim=axes, keepdim=True) if axes else value
        for label, reduced in ((name, largest), (f"{name}_rms", _rms(value, axes, largest))):
            found[label] = reduced.reshape(1) if reduced.dim() == 0 else reduced
    return found


def _joined(label: str, value: torch.Tensor, parts: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Blocks of one slice put together: the largest, or the mean square weighted by rows."""
    if not label.endswith("_rms"):
        return value.amax(0, keepdim=True)
    weight = torch.cat([part["rows"] for part in parts])
    largest = value.amax(0, keepdim=True)
    safe = torch.where(largest > 0, largest, 1.0)
    return ((value / safe).square() * weight / weight.sum(0, keepdim=True)).sum(0, keepdim=True).sqrt() * safe


def _worst(
    tensor: torch.Tensor,
    truth: Truth,
    used: float,
    where: tuple[int, ...],
    rows: slice | EllipsisType,
    keep: tuple[int, ...],
    circular: bool,
) -> Measured:
    """The element with the largest error in the slice that uses most of its budget, which lies in ``rows``."""
    at = tuple(where[axis] if axis in keep else slice(None) for axis in range(tensor.dim()))
    error = _difference(tensor[rows][at].double(), truth.oracle[rows][at], circular)
    inner = list(_place(error))
    index = [where[axis] if axis in keep else inner.pop(0) for axis in range(tensor.dim())]
    if isinstance(rows, slice):
        index[0] += int(rows.start)
    place = tuple(index)
    return Measured(
        float(_difference(tensor[place].double(), truth.oracle[place], circular)),
        used,
        place,
        float(tensor[place]),
        float(truth.oracle[place]),
    )


def _place(tensor: torch.Tensor) -> tuple[int, ...]:
    """Where the largest element is."""
    return tuple(int(i) for i in np.unravel_index(int(tensor.argmax()), tuple(tensor.shape)))


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


def _rms(value: torch.Tensor, axes: tuple[int, ...], largest: torch.Tensor) -> torch.Tensor:
    # Scaled by the largest element: squares of values near the ends of the range would over- or underflow.
    safe = torch.where(largest > 0, largest, 1.0)
    return (value / safe).square_().mean(dim=axes, keepdim=True).sqrt() * safe if axes else value


def _ratio(error: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    return torch.where(error == 0, 0.0, error / budget)


def floats(tensors: Iterable[object]) -> list[torch.Tensor]:
    """The floating tensors among leaves."""
    return [t for t in tensors if isinstance(t, torch.Tensor) and t.dtype.is_floating_point]
