"""determinism: three runs on the same inputs are equal to the bit where that is claimed, else within budget.

Not shown: other machines, thread counts or library versions.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from proofs.session import Session
from proofs.worker import Rejection

RUNS = 3


def check(session: Session) -> None:
    """Three separate calls, outputs and gradients."""
    for case in session.cases(("small", "ragged", "extreme")):
        drawn = session.draw(case, 50)
        if session.outside(drawn.arguments) is not None:
            continue
        names = session.judge.differentiable(drawn.arguments) if session.claims.grad else []
        cotangents = [session.judge.cotangents(drawn)] if names else []
        runs = [_flat(session.ask(drawn.arguments, grad=names, cotangents=cotangents)) for _ in range(RUNS)]
        for run in runs[1:]:
            for name, value in run.items():
                session.tally.checks += 1
                session.tally.cases.add(case.name)
                equal(session, f"{name} ({drawn.where})", runs[0][name], value)


def _flat(answer: dict[str, Any]) -> dict[str, Any]:
    found = {f"output {i}": value for i, value in enumerate(answer["outputs"])}
    for grads in answer["grads"]:
        found.update({f"gradient of {name}": value for name, value in grads.items() if value is not None})
    return found


def equal(session: Session, name: str, first: Any, other: Any) -> None:
    """Equal to the bit, or within budget where only a tolerance is claimed; else ``Rejection``."""
    if not isinstance(first, torch.Tensor) or not isinstance(other, torch.Tensor) or first.shape != other.shape:
        if first != other:
            raise Rejection("mismatch", f"{name} differs between runs in form", where=name)
        return
    a, b = first.to_dense(), other.to_dense()
    if bool(((a == b) | ((a != a) & (b != b))).all()):
        return
    difference = (a.double() - b.double()).abs().max().item()
    if session.claims.determinism == "bitwise":
        raise Rejection(
            "mismatch",
            f"{name} differs between runs by {difference:.3g}, bitwise is claimed",
            where=name,
            error=difference,
        )
    allowed = session.operator.tolerance.c * session.judge.eps * a.double().abs().max().item()
    if not difference <= allowed or math.isnan(difference):
        raise Rejection(
            "mismatch",
            f"{name} differs between runs by {difference:.3g}, over its budget {allowed:.3g}",
            where=name,
            error=difference,
        )
