"""The check on the check: on every case an all-zero and a constant output must fail, or the case shows nothing."""

from __future__ import annotations

import torch

from proofs.budget import Truth, measure
from proofs.judge import Drawn, Expected
from proofs.session import Session
from proofs.worker import Rejection

# A reference further from its oracle than this fraction of the values is no measure for anybody.
COARSEST = {"float32": 0.02, "float64": 0.02, "bfloat16_autocast": 0.5}


class VacuousCaseError(ValueError):
    """A case on which a constant answer passes; the case is at fault, not the variant."""


def check_case(session: Session, drawn: Drawn, expected: Expected, *, gradients: bool = False) -> None:
    """Raise ``VacuousCaseError`` when zeros, or the mean of each output, would be accepted on this case."""
    truths = {n: t for n, t in (expected.grads[0] if gradients else expected.outputs).items() if t is not None}
    for name, truth in truths.items():
        if (
            not truth.is_exact
            and float(truth.reference_error.max()) > COARSEST[session.dtype] * float(truth.oracle.abs().max()) > 0
        ):
            raise VacuousCaseError(
                f"{session.operator.name}: the reference's own error in {name} swallows its values on {drawn.where} "
                f"at {session.dtype}; no budget can rest on it"
            )
    for label, fake in (("zeros", torch.zeros_like), ("the constant mean", _mean)):
        scalars = label != "zeros" and all(t.oracle.numel() == 1 for t in truths.values())
        if (
            truths
            and not scalars
            and not any(_fails(session, name, truth, fake(truth.oracle)) for name, truth in truths.items())
        ):
            kind = "gradients" if gradients else "outputs"
            raise VacuousCaseError(
                f"{session.operator.name}: {label} pass for the {kind} of {drawn.where} at {session.dtype}; "
                "the case shows nothing"
            )


def _mean(oracle: torch.Tensor) -> torch.Tensor:
    if not oracle.dtype.is_floating_point:
        return torch.full_like(oracle, int(oracle.double().mean().round()))
    return torch.full_like(oracle, float(oracle.mean()))


def _fails(session: Session, name: str, truth: Truth, fake: torch.Tensor) -> bool:
    circular = name in session.operator.circular
    try:
        measured = measure(
            name,
            fake.to(truth.dtypes[0]),
            truth,
            session.operator.tolerance,
            session.dtype,
            circular=circular,
            keep=session.slices(name),
        )
    except Rejection:
        return True
    return not measured.used <= 1
