"""Tables measured in rounds of processes: every cell once a round, the order rotated, ratios taken within a round."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from benchmarks import floors, runner
from benchmarks.check import disagreement
from benchmarks.memory import default_limit_bytes
from benchmarks.spec import Cell, Outcome, Table
from registry import Catalogue, device_class

Answer = dict[str, Tensor]


@dataclass
class Row:
    """A cell and its outcome a round; ``ended`` is the first outcome that was not measured, and final."""

    cell: Cell
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    ended: Outcome | None = None
    checked: bool | None = None

    @property
    def median_s(self) -> float | None:
        """Median over rounds of the rounds' medians."""
        found = [o.median_s for o in self.outcomes.values() if o.median_s is not None]
        return statistics.median(found) if found and self.ended is None else None


@dataclass(frozen=True)
class Runner:
    """Runs tables; ``refusal`` says why a cell must not start, ``progress`` is told every cell."""

    catalogue: Catalogue
    limit_bytes: int
    refusal: Callable[[Cell], str]
    progress: Callable[[Cell], None]
    machine: Mapping[str, Any] | None = None

    def run(self, table: Table) -> list[dict[str, Any]]:
        """Measure a table and return its records, in the table's order."""
        rows = [Row(cell) for cell in table.cells]
        for row in rows:
            reason = self.refusal(row.cell)
            row.ended = Outcome(status="refused", reason=reason) if reason else None
        for number in range(table.rounds):
            self._round(table, rows, number)
        return [self._record(row, rows[0] if table.compared else None) for row in rows]

    def _round(self, table: Table, rows: list[Row], number: int) -> None:
        turn = number % len(rows)
        checking = table.checked and number in (0, table.rounds - 1)
        seed = secrets.randbelow(2**31)
        answers: dict[int, Answer] = {}
        for index in [*range(turn, len(rows)), *range(turn)]:
            row = rows[index]
            self.progress(row.cell)
            if row.ended is not None:
                continue
            cell = replace(row.cell, seed=1000 * number + 1)
            outcome, found = runner.run(cell, self.limit_bytes, (seed,) if checking else ())
            if outcome.reason.startswith("slow start"):
                outcome, found = runner.run(cell, self.limit_bytes, (seed,) if checking else ())
            # A row refused for its timing is checked too: a wrong output is the better reason.
            answers |= {index: found[0]} if found else {}
            if outcome.status == "measured":
                row.outcomes[number] = outcome
            else:
                row.ended = outcome
        if checking and any(answers):
            self._check(rows, answers, seed)

    def _check(self, rows: list[Row], answers: dict[int, Answer], seed: int) -> None:
        """Refuse rows whose answer is not the reference's, computed apart where the reference did not run."""
        expected = answers.get(0)
        if expected is None and rows[0].cell.kind in ("operator", "fetch"):
            alone = replace(rows[0].cell, check_only=True, seed=1)
            _, found = runner.run(replace(alone, need_bytes=0), default_limit_bytes(), (seed,))
            expected = found[0] if found else None
        if expected is None:
            return
        for index, actual in answers.items():
            wrong = disagreement(self.catalogue, rows[index].cell, seed, expected, actual)
            rows[index].checked = not wrong
            if wrong:
                rows[index].ended = Outcome(status="refused", reason=f"wrong output after timing: {wrong}")

    def _record(self, row: Row, reference: Row | None) -> dict[str, Any]:
        cell = row.cell
        outcomes = list(row.outcomes.values()) if row.ended is None else []
        ratios = _ratios(reference, row) if reference is not None and reference is not row and row.ended is None else []
        peaks = [o.peak_bytes for o in outcomes if o.peak_bytes is not None]
        status = "measured" if row.ended is None else row.ended.status
        return {
            "suite": cell.suite,
            "operator": cell.operator,
            "variant": cell.variant,
            "recipe": cell.recipe,
            "case": cell.case,
            "axes": dict(cell.axes),
            "mode": cell.mode,
            "device": device_class(cell.device),
            "dtype": cell.dtype,
            "status": status,
            "values_s": [value for o in outcomes for value in o.values_s] or None,
            "median_s": row.median_s,
            "peak_bytes": int(statistics.median(peaks)) if peaks else None,
            "floor_s": floors.floor_s(cell.operator, cell.axes, cell.mode, cell.dtype, self.machine)
            if cell.kind in ("operator", "fetch")
            else None,
            "reason": row.ended.reason if row.ended is not None else "",
            "null": cell.null,
            "proven": cell.proven,
            "options": dict(cell.options),
            "threads": cell.threads,
            "rounds": {str(n): o.median_s for n, o in sorted(row.outcomes.items())} if row.ended is None else {},
            "ratio": statistics.median(ratios) if ratios else None,
            "ratios": ratios or None,
            "checked": row.checked,
            "limit_bytes": self.limit_bytes,
            "details": dict(outcomes[-1].details) if outcomes else {},
        }


def _ratios(reference: Row, row: Row) -> list[float]:
    """Reference time over the row's, in every round that has both."""
    if reference.ended is not None:
        return []
    pairs = [
        (reference.outcomes[n].median_s, o.median_s) for n, o in sorted(row.outcomes.items()) if n in reference.outcomes
    ]
    return [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
