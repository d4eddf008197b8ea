"""memory: peak bytes above inputs and outputs stay under the bound that the variant declares, as the size grows.

Not shown: sizes beyond those measured, fragmentation, and memory below two MiB, which the counter does not resolve.
"""

from __future__ import annotations

from proofs.session import Session
from proofs.worker import Rejection

RESOLUTION_BYTES = 2 << 20
GROWTH = (1, 2, 4)
LIMITS = {"V": 16384, "D": 256, "E": 16}


def check(session: Session) -> None:
    """Measure the forward pass at growing sizes of the largest case that is small enough to repeat."""
    case = next(c for c in session.operator.cases() if c.kind == "real")
    case = case.resized(**{letter: min(size, LIMITS.get(letter, size)) for letter, size in case.sizes.items()})
    growing = next(letter for letter in ("N", "C", "G", "L", "B") if letter in case.sizes)
    itemsize = 8 if session.dtype == "float64" else 4
    for factor in GROWTH:
        shrink = 4 if session.dtype == "float64" else 2
        grown = case.resized(**{growing: max(1, case.sizes[growing] * factor // shrink)})
        drawn = session.draw(grown, 0)
        if session.outside(drawn.arguments) is not None:
            continue
        bound = session.ask({}, "declared", sizes=dict(grown.sizes), itemsize=itemsize)["bound"]
        measured = session.ask(drawn.arguments, "memory")
        above = max(0, measured["peak"] - measured["outputs"])
        used = above / (bound + RESOLUTION_BYTES)
        session.tally.checks += 1
        session.tally.cases.add(grown.name)
        session.tally.details[f"{growing}={grown.sizes[growing]}"] = {"peak_bytes": above, "bound_bytes": bound}
        if used > 1:
            raise Rejection(
                "over_memory",
                f"needs {above} bytes above inputs and outputs, declares {bound} ({drawn.where})",
                where=drawn.where,
                error=float(above),
                used=used,
            )
        if used > session.tally.budget_used:
            session.tally.budget_used, session.tally.where = used, drawn.where
