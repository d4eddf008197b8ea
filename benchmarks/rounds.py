"""Tables measured in rounds of processes: every cell has one a round, the order rotated, and ratios are taken within.

Where the cells of a round take turns, a round's ratio is the median over turns of the reference's time over the row's.
"""

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
        seed = secrets.randbelow(2**31)
        checking = table.checked and number in (0, table.rounds - 1)
        seeds = (seed,) if checking else ()
        open_ = []
        for index in [*range(turn, len(rows)), *range(turn)]:
            if rows[index].ended is None:
                open_.append(index)
            else:
                self.progress(rows[index].cell)
        cells = [replace(rows[index].cell, seed=_seed(number)) for index in open_]
        if table.together:
            results = runner.run(cells, self.limit_bytes, seeds, self.progress)
        else:
            results = [runner.run([cell], self.limit_bytes, seeds, self.progress)[0] for cell in cells]
        answers: dict[int, Answer] = {}
        for index, cell, result in zip(open_, cells, results, strict=True):
            outcome, found = result
            if outcome.reason.startswith("slow start"):
                outcome, found = runner.alone(cell, self.limit_bytes, seeds)
            # A row refused for its timing is checked too: a wrong output is the better reason.
            answers |= {index: found[0]} if found else {}
            if outcome.status == "measured":
                rows[index].outcomes[number] = outcome
            else:
                rows[index].ended = outcome
        if checking and any(answers):
            self._check(rows, answers, seed, number)

    def _check(self, rows: list[Row], answers: dict[int, Answer], seed: int, number: int) -> None:
        """Refuse rows whose answer is not the reference's, computed apart where the reference did not run."""
        expected = answers.get(0)
        if expected is None and rows[0].cell.kind in ("operator", "fetch"):
            only = replace(rows[0].cell, check_only=True, seed=_seed(number), need_bytes=0)
            _, found = runner.alone(only, default_limit_bytes(), (seed,))
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


def _seed(number: int) -> int:
    """Of a round's inputs."""
    return 1000 * number + 1


def _ratios(reference: Row, row: Row) -> list[float]:
    """Reference time over the row's, in every round that has both: the median over turns that lay side by side."""
    if reference.ended is not None:
        return []
    both = [(reference.outcomes[n], o) for n, o in sorted(row.outcomes.items()) if n in reference.outcomes]
    return [_ratio(ours, theirs) for ours, theirs in both]


def _ratio(ours: Outcome, theirs: Outcome) -> float:
    if ours.alone or theirs.alone or len(ours.values_s) != len(theirs.values_s):
        return statistics.median(ours.values_s) / statistics.median(theirs.values_s)
    return statistics.median(a / b for a, b in zip(ours.values_s, theirs.values_s, strict=True))
