"""identity: the named function really ran, and the reference did not run in its place.

Not shown: a copy of the reference under another name, which is not wrong, only not faster.
"""

from __future__ import annotations

from proofs.session import Session
from proofs.worker import Rejection


def check(session: Session) -> None:
    """Watch which code runs, forward and backward, on every small case."""
    is_reference = session.claims.name == session.operator.reference
    for case in session.cases(("small", "ragged", "edge", "extreme")):
        drawn = session.draw(case, 95)
        if session.outside(drawn.arguments) is not None:
            continue
        names = session.judge.differentiable(drawn.arguments) if session.claims.grad else []
        cotangents = [session.judge.cotangents(drawn)] if names else []
        answer = session.ask(drawn.arguments, identify=True, grad=names, cotangents=cotangents)
        session.tally.checks += 1
        session.tally.cases.add(case.name)
        if not answer["own_ran"]:
            raise Rejection("fell_back", f"the variant's own function did not run ({drawn.where})", where=drawn.where)
        if answer["reference_ran"] and not is_reference and not _declared(session, drawn.arguments):
            raise Rejection(
                "fell_back",
                f"falls back to the reference {session.operator.reference} without declaring it ({drawn.where})",
                where=drawn.where,
            )


def _declared(session: Session, arguments: dict[str, object]) -> bool:
    return session.claims.falls_back and bool(session.ask(arguments, "declared")["falls_back"])
