"""Runs cells in fresh processes under their time and memory limits; whatever happens to one becomes an outcome."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from benchmarks import cell as child
from benchmarks.memory import Resident, default_limit_bytes, kill_tree
from benchmarks.spec import Cell, Outcome

POLL_S = 0.02
# What the parent's clock may show above what the cell says it spent: a stopped or slowed clock in the cell shows more.
CLOCK_FACTOR, CLOCK_SLACK_S = 1.25, 1.0


class _EndedError(Exception):
    """The process did not answer; carries the outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


@dataclass
class Process:
    """One started cell: the pipe, the limits and the most bytes that its tree was seen to hold.

    ``outcome`` is set once the process has ended or was refused; until then ``waiting`` says that it has a turn left.
    """

    cell: Cell
    limit_bytes: int
    most_bytes: int = 0
    outcome: Outcome | None = None
    waiting: bool = False
    answers: list[dict[str, Any]] = field(default_factory=list)
    _process: Any = None
    _connection: Any = None
    _tree: Resident | None = None
    _log: str = ""
    _spent_s: float = 0.0
    _timing_since: float = 0.0
    _busy_s: float = 0.0
    _wall_s: float = 0.0

    def start(self) -> None:
        """Fork from the server that has torch loaded; nothing of a former cell is in it."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.preload"])
        self._connection, theirs = context.Pipe()
        handle, self._log = tempfile.mkstemp(suffix=".log")
        os.close(handle)
        self._process = context.Process(target=child.serve, args=(theirs, self.cell.to_json(), self._log), daemon=False)
        self._process.start()
        with contextlib.suppress(psutil.NoSuchProcess):
            self._tree = Resident(psutil.Process(self._process.pid))
        theirs.close()

    def begin(self) -> None:
        """Start, and let it calibrate up to its first turn."""
        if self.cell.need_bytes > self.limit_bytes:
            reason = f"memory: {_gib(self.cell.need_bytes)} needed, limit {_gib(self.limit_bytes)}"
            self.outcome = Outcome(status="refused", reason=reason)
            return
        self.start()
        if not self.cell.check_only:
            assert self.answer() == "timing"
            self._timing_since = monotonic()
            if self.cell.kind != "trainer":
                self._wait()

    def turn(self) -> None:
        """Let it draw and time one batch."""
        self.ask("go")
        self._wait()

    def _wait(self) -> None:
        message = self.answer()
        self.waiting = message == "turn"
        if not self.waiting:
            self._busy_s, self._wall_s = float(message["busy_s"]), monotonic() - self._timing_since

    def finish(self, check_seeds: Sequence[int]) -> None:
        """Its numbers, then its answers to the check seeds, which it learns only now."""
        outcome = Outcome(status="refused", reason="only checked") if self.cell.check_only else self._measured()
        if self.cell.kind != "trainer":
            for seed in check_seeds:
                self.ask(seed)
                self.answers.append(torch.load(io.BytesIO(self.answer(raw=True)), weights_only=True))
        self.outcome = outcome

    def _measured(self) -> Outcome:
        """What the cell says about its timed region, judged by the parent's own clock."""
        if self.cell.kind != "trainer":
            self.ask("go")
        found = self.answer()
        if self.cell.kind == "trainer":
            found |= {"median_s": statistics.median(found["values_s"]), "slow_start": False, "tampered": False}
        elif self._wall_s > CLOCK_FACTOR * self._busy_s + CLOCK_SLACK_S:
            reason = f"the cell's clock says {self._busy_s:.2f} s, the parent's {self._wall_s:.2f} s"
            return Outcome(status="refused", reason=reason)
        if found["tampered"]:
            return Outcome(status="refused", reason="the timer shows less than the clock that no variant could reach")
        if found["slow_start"]:
            trial_s, median_s = found["details"]["trial_s"], found["median_s"]
            reason = f"slow start: {trial_s:.3g} s a call while calibrating, {median_s:.3g} s after"
            return Outcome(status="refused", reason=reason)
        return Outcome(
            status="measured",
            values_s=tuple(found["values_s"]),
            median_s=found["median_s"],
            peak_bytes=found["peak_bytes"],
            details={**found["details"], "most_resident_bytes": self.most_bytes},
        )

    def answer(self, *, raw: bool = False) -> Any:
        """The next message; ``_EndedError`` when the process ends, or passes its time or memory limit."""
        began = monotonic()
        while not self._connection.poll(POLL_S):
            self._within_limits(self._spent_s + monotonic() - began)
        self._spent_s += monotonic() - began
        self._within_limits(self._spent_s)
        try:
            message = self._connection.recv_bytes()
            return message if raw else json.loads(message)
        except (EOFError, ConnectionResetError):
            raise self._crashed() from None

    def _within_limits(self, spent_s: float) -> None:
        """Looked at with every answer too: many quick turns count as one slow one does.

        The time that the process waited for the others is not its own.
        """
        if self._tree is not None:
            self.most_bytes = max(self.most_bytes, self._tree())
        if self.most_bytes > self.limit_bytes:
            raise self._ended("killed_memory", f"{_gib(self.most_bytes)} resident, limit {_gib(self.limit_bytes)}")
        if spent_s > self.cell.limit_s:
            raise self._ended("timed_out", f"not done within {self.cell.limit_s:g} s")

    def ask(self, message: Any) -> None:
        """Send a message to the process."""
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            raise self._crashed() from None

    def _crashed(self) -> _EndedError:
        self._process.join(timeout=10)
        code = self._process.exitcode
        lines = Path(self._log).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1][:300] if lines else "no message"
        if code == -signal.SIGKILL:
            return self._ended("killed_memory", f"killed by the system, {_gib(self.most_bytes)} resident")
        if "OutOfMemoryError" in last or "can't allocate memory" in last:
            return self._ended("killed_memory", last)
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return self._ended("crashed", f"{how}: {last}")

    def _ended(self, status: str, reason: str) -> _EndedError:
        return _EndedError(Outcome(status=status, reason=reason))

    def stop(self) -> None:
        """End the process and everything it started."""
        if self._process is None:
            return
        if self._process.is_alive():
            kill_tree(psutil.Process(self._process.pid))
        self._process.join(timeout=10)
        self._connection.close()
        Path(self._log).unlink(missing_ok=True)
        self._process = None


def run(
    cells: Sequence[Cell],
    limit_bytes: int,
    check_seeds: Sequence[int] = (),
    progress: Callable[[Cell], None] = lambda cell: None,
) -> list[tuple[Outcome, list[dict[str, Any]]]]:
    """Measure cells that take turns, then have each answer the check seeds; outcomes and answers in their order.

    All processes are alive together, one alone computes. Memory is shared by as many: what was killed for it beside
    others is measured again alone.
    """
    processes = [Process(cell, limit_bytes) for cell in cells]
    try:
        for process in processes:
            progress(process.cell)
            if len(cells) > 1:
                process.limit_bytes = min(limit_bytes, default_limit_bytes())
            _guarded(process, process.begin)
        turn = 0
        while waiting := [process for process in processes if process.waiting]:
            first = turn % len(waiting)
            for process in (*waiting[first:], *waiting[:first]):
                _guarded(process, process.turn)
            turn += 1
        for process in processes:
            if process.outcome is None:
                _guarded(process, lambda process=process: process.finish(check_seeds))  # type: ignore[misc]
            process.stop()
    finally:
        for process in processes:
            process.stop()
    results = []
    for process in processes:
        assert process.outcome is not None
        if process.outcome.status == "killed_memory" and len(cells) > 1:
            results.append(alone(process.cell, limit_bytes, check_seeds))
        else:
            results.append((process.outcome, process.answers))
    return results


def alone(cell: Cell, limit_bytes: int, check_seeds: Sequence[int] = ()) -> tuple[Outcome, list[dict[str, Any]]]:
    """Measure one cell with nothing beside it."""
    ((outcome, answers),) = run([cell], limit_bytes, check_seeds)
    return replace(outcome, alone=True), answers


def _guarded(process: Process, step: Callable[[], None]) -> None:
    """A step of a process; its end becomes its outcome."""
    try:
        step()
    except _EndedError as ended:
        process.outcome, process.waiting, process.answers = ended.outcome, False, []
        process.stop()


def rates(device: str, threads: int) -> dict[str, Any]:
    """The machine's rates, measured in a process of their own; ``RuntimeError`` if that fails."""
    cell = Cell(
        suite="rates",
        kind="rates",
        operator="rates",
        variant="rates",
        case="",
        axes={},
        mode="step",
        device=device,
        threads=threads,
    )
    process = Process(cell, 1 << 62)
    process.start()
    try:
        return dict(process.answer()["rates"])
    except _EndedError as ended:
        raise RuntimeError(f"the machine's rates could not be measured: {ended.outcome.reason}") from None
    finally:
        process.stop()


def _gib(number: int) -> str:
    return f"{number / 2**30:.2f} GiB"
