"""forward: outputs within budget on every case, five fresh seeds each, and on drawn shapes, values and strides.

Not shown: inputs of other distributions than the cases', and sizes beyond the 1B shape.
"""

from __future__ import annotations

from proofs.judge import Drawn
from proofs.session import Session
from proofs.vacuity import check_case
from proofs.worker import Rejection


def check(session: Session) -> None:
    """Compare every output of every case with the oracle; outside its domain the variant must refuse."""
    inside = 0
    for case in session.cases():
        for seed in session.seeds(case):
            drawn = session.draw(case, seed)
            if session.outside(drawn.arguments) is not None:
                session.must_refuse(drawn)
                continue
            inside += 1
            expected = session.judge.expected(drawn)
            if seed == 0:
                check_case(session, drawn, expected)
            session.compare(session.ask(drawn.arguments), expected, drawn)
    if not inside:
        raise Rejection("skipped", "no case lies in the domain that the variant claims")

    def holds(drawn: Drawn, layout: str) -> None:
        answer = session.ask(drawn.arguments, layout=session.layout_of(drawn, layout))
        session.compare(answer, session.judge.expected(drawn), drawn, note=f"inputs {layout}")

    session.for_drawn_shapes(holds)
