"""Outputs after timing, held against the reference's: loosely, as only the question whether work was done is open."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks import inputs
from benchmarks.spec import Cell
from benchmarks.work import as_case, likelihood
from registry import Catalogue, Operator

EPS = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16_autocast": 2.0**-8}
# The proofs judge against an oracle to k and c; here both sides are rounded and no reference error is known.
GENEROSITY = 64.0
ENGINE_TOLERANCE = 2e-3
SIGMAS = 6.0


def disagreement(
    catalogue: Catalogue, cell: Cell, seed: int, expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]
) -> str:
    """Empty, or what is wrong with the cell's answer to a check seed, in words."""
    if set(expected) != set(actual):
        return f"outputs {sorted(actual)} instead of {sorted(expected)}"
    operator = catalogue.operators.get(cell.operator) if cell.kind in ("operator", "fetch") else None
    if operator is not None and operator.probabilities is not None:
        return _improbable(operator, cell, seed, actual)
    for name, wanted in expected.items():
        found = actual[name]
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return f"{name} is {tuple(found.shape)} {found.dtype} instead of {tuple(wanted.shape)} {wanted.dtype}"
        error, allowed = _distance(found, wanted), _allowed(operator, cell, wanted)
        if not error <= allowed:
            return f"{name} is off by {error:.3g}, allowed {allowed:.3g}"
    return ""


def _distance(found: Tensor, wanted: Tensor) -> float:
    found, wanted = (t.to_dense() if t.layout is not torch.strided else t for t in (found, wanted))
    if not wanted.numel():
        return 0.0
    both = found.double() - wanted.double()
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    return float(torch.where(same, 0.0, both).abs().max())


def _allowed(operator: Operator | None, cell: Cell, wanted: Tensor) -> float:
    if not wanted.dtype.is_floating_point or (operator is not None and operator.tolerance.exact):
        return 0.0
    scale = float(wanted.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) if wanted.numel() else 0.0
    if operator is None:
        return ENGINE_TOLERANCE * scale
    return GENEROSITY * (operator.tolerance.k + operator.tolerance.c) * EPS[cell.dtype] * scale


def _improbable(operator: Operator, cell: Cell, seed: int, actual: Mapping[str, Tensor]) -> str:
    arguments = inputs.drawn(operator, as_case(cell), seed, cell.dtype, "cpu")
    tokens = actual[operator.outputs[0]]
    hidden, weight = arguments["hidden"], arguments["weight"]
    if tuple(tokens.shape) != (hidden.shape[0],) or tokens.dtype != torch.int64:
        return f"tokens are {tuple(tokens.shape)} {tokens.dtype}"
    if int(tokens.min()) < 0 or int(tokens.max()) >= weight.shape[0]:
        return f"tokens lie outside 0..{weight.shape[0] - 1}"
    off = likelihood(operator.probabilities, arguments, tokens)
    return f"tokens are {off:.1f} standard deviations from their law" if abs(off) > SIGMAS else ""
