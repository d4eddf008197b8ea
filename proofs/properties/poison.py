"""poison: with fresh allocations full of NaN or huge values every element of the output is still written.

Not shown: memory that a variant gets from elsewhere than torch or the C allocator.
"""

from __future__ import annotations

from proofs.session import Session
from proofs.worker import Rejection


def check(session: Session) -> None:
    """Outputs and gradients while allocations are poisoned, on each case."""
    for case in session.cases(("small", "ragged", "edge")):
        for seed in (70, 71):
            drawn = session.draw(case, seed)
            if session.outside(drawn.arguments) is not None:
                continue
            names = session.judge.differentiable(drawn.arguments) if session.claims.grad else []
            cotangents = [session.judge.cotangents(drawn)] if names else []
            expected = session.judge.expected(drawn, cotangents, key="random" if names else None)
            answer = session.ask(drawn.arguments, poison=True, grad=names, cotangents=cotangents)
            try:
                session.compare(answer, expected, drawn, note="allocations poisoned")
                if names:
                    session.compare_grads(answer["grads"][0], expected.grads[0], drawn, "allocations poisoned")
            except Rejection as rejection:
                clean = session.ask(drawn.arguments, grad=names, cotangents=cotangents)
                session.compare(clean, expected, drawn)
                if names:
                    session.compare_grads(clean["grads"][0], expected.grads[0], drawn)
                raise Rejection(
                    "not_written", f"reads memory it did not write: {rejection.message}", where=rejection.where
                ) from rejection
