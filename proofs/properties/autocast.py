"""autocast: the same budgets with bfloat16's eps under bf16 autocast, the backward outside it.

Not shown: float16, or a backward inside the autocast region.
"""

from __future__ import annotations

from proofs.session import Session


def check(session: Session) -> None:
    """Outputs and gradients of each case under autocast."""
    for case in session.cases(("small", "ragged", "edge")):
        for seed in session.seeds(case):
            drawn = session.draw(case, 80 + seed)
            if session.outside(drawn.arguments) is not None:
                continue
            names = session.judge.differentiable(drawn.arguments) if session.claims.grad else []
            cotangents = [session.judge.cotangents(drawn)] if names else []
            expected = session.judge.expected(drawn, cotangents, key="random" if names else None)
            answer = session.ask(drawn.arguments, grad=names, cotangents=cotangents)
            session.compare(answer, expected, drawn, note="bf16 autocast")
            if names:
                session.compare_grads(answer["grads"][0], expected.grads[0], drawn, "bf16 autocast")
