"""gradient: the gradient of every differentiable input for random cotangents on every output.

Contiguous, strided and stride-0 cotangents; a second backward on the same graph with other cotangents unless
``single_backward`` is claimed; inputs with their gradient off one at a time. Not shown: second derivatives.
"""

from __future__ import annotations

from typing import Any

from proofs.judge import Drawn
from proofs.properties.purity import unchanged
from proofs.session import Session
from proofs.vacuity import check_case
from proofs.worker import Rejection

Cotangents = list[list[Any]]


def check(session: Session) -> None:
    """Compare all gradients with the oracle's, in every form a cotangent comes in."""
    for case in session.cases():
        for seed in session.seeds(case):
            drawn = session.draw(case, seed)
            if session.outside(drawn.arguments) is not None:
                continue
            cotangents = [session.judge.cotangents(drawn)]
            if seed == 0:
                # Declared cases only: of one token without a carry, which may be drawn, q's gradient is zero in truth.
                check_case(session, drawn, session.judge.expected(drawn, cotangents, key="random"), gradients=True)
            _one(session, drawn, "random", cotangents)
            if case.kind == "real" or seed > 1:
                continue
            _one(session, drawn, "random", [session.judge.cotangents(drawn)], layout="strided")
            _one(session, drawn, "uniform", [session.judge.cotangents(drawn, uniform=True)])
            if not session.claims.single_backward:
                _one(session, drawn, "twice", [session.judge.cotangents(drawn, i) for i in (0, 1)])
            if seed == 0 and case.kind in ("small", "ragged"):
                _one_at_a_time(session, drawn)

    def holds(drawn: Drawn, layout: str) -> None:
        _one(session, drawn, "random", [session.judge.cotangents(drawn)], layout=layout)

    session.for_drawn_shapes(holds)


def _one(session: Session, drawn: Drawn, key: str, cotangents: Cotangents, layout: str = "contiguous") -> None:
    names = session.judge.differentiable(drawn.arguments)
    expected = session.judge.expected(drawn, cotangents, key=key)
    answer = session.ask(
        drawn.arguments,
        grad=names,
        cotangents=cotangents,
        cotangent_layout=layout,
        return_inputs=drawn.case.kind != "real",
    )
    for index, (grads, truth) in enumerate(zip(answer["grads"], expected.grads, strict=True)):
        note = f"{layout} {key} cotangent" + (", second backward" if index else "")
        session.compare_grads(grads, truth, drawn, note)
    _inputs_intact(session, drawn, answer)


def _inputs_intact(session: Session, drawn: Drawn, answer: dict[str, Any]) -> None:
    if "inputs" in answer:
        # A backward may write into what it saved: the inputs are compared after it.
        unchanged(session, drawn, answer["inputs"], "after the backward")


def _one_at_a_time(session: Session, drawn: Drawn) -> None:
    """With one input's gradient off the others' stay as they are, and with only one on it is right."""
    names = session.judge.differentiable(drawn.arguments)
    cotangents = [session.judge.cotangents(drawn)]
    truth = session.judge.expected(drawn, cotangents, key="random").grads[0]
    for name in names[:12]:
        for wanted, note in (
            ([n for n in names if n != name], f"{name} without gradient"),
            ([name], f"only {name} with gradient"),
        ):
            answer = session.ask(drawn.arguments, grad=wanted, cotangents=cotangents)
            if not wanted and any(answer["requires_grad"]):
                raise Rejection(
                    "mismatch",
                    f"an output requires a gradient although no input does ({drawn.where})",
                    where=drawn.where,
                )
            session.compare_grads(answer["grads"][0], {n: truth[n] for n in wanted}, drawn, note)
