"""determinism: three runs on the same inputs are equal to the bit where that is claimed, else within budget.

Not shown: other machines, thread counts or library versions.
"""

from __future__ import annotations

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
        expected = session.judge.expected(drawn, cotangents, key="random" if names else None)
        answers = [session.ask(drawn.arguments, grad=names, cotangents=cotangents) for _ in range(RUNS)]
        if session.claims.determinism == "tolerance" and session.operator.probabilities is None:
            for number, answer in enumerate(answers):
                session.compare(answer, expected, drawn, note=f"run {number + 1}")
                if names:
                    session.compare_grads(answer["grads"][0], expected.grads[0], drawn, f"run {number + 1}")
            continue
        runs = [_flat(answer) for answer in answers]
        for run in runs[1:]:
            for name, value in run.items():
                session.tally.checks += 1
                session.tally.cases.add(case.name)
                equal(f"{name} ({drawn.where})", runs[0][name], value)


def _flat(answer: dict[str, Any]) -> dict[str, Any]:
    found = {f"output {i}": value for i, value in enumerate(answer["outputs"])}
    for grads in answer["grads"]:
        found.update({f"gradient of {name}": value for name, value in grads.items() if value is not None})
    return found


def equal(name: str, first: Any, other: Any) -> None:
    """Equal to the bit, else ``Rejection``."""
    if not isinstance(first, torch.Tensor) or not isinstance(other, torch.Tensor) or first.shape != other.shape:
        if first != other:
            raise Rejection("mismatch", f"{name} differs between runs in form", where=name)
        return
    a, b = first.to_dense(), other.to_dense()
    if not bool(((a == b) | ((a != a) & (b != b))).all()):
        difference = (a.double() - b.double()).abs().max().item()
        words = f"{name} differs between runs by {difference:.3g}, bitwise is claimed"
        raise Rejection("mismatch", words, where=name, error=difference)
