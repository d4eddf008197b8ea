"""Runs one cell in a fresh process under its time and memory limits; whatever happens to it becomes an outcome."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from benchmarks import cell as child
from benchmarks.memory import Resident, kill_tree
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
    """One started cell: the pipe, the limits and the most bytes that its tree was seen to hold."""

    cell: Cell
    limit_bytes: int
    most_bytes: int = 0
    _process: Any = None
    _connection: Any = None
    _log: str = ""
    _began: float = field(default_factory=monotonic)

    def start(self) -> None:
        """Fork from the server that has torch loaded; nothing of a former cell is in it."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.cell"])
        self._connection, theirs = context.Pipe()
        handle, self._log = tempfile.mkstemp(suffix=".log")
        os.close(handle)
        self._process = context.Process(target=child.serve, args=(theirs, self.cell.to_json(), self._log), daemon=False)
        self._began = monotonic()
        self._process.start()
        theirs.close()

    def answer(self, *, raw: bool = False) -> Any:
        """The next message; ``_EndedError`` when the process ends, or passes its time or memory limit."""
        tree = Resident(psutil.Process(self._process.pid)) if self._process.is_alive() else None
        while not self._connection.poll(POLL_S):
            if tree is not None:
                self.most_bytes = max(self.most_bytes, tree())
            if self.most_bytes > self.limit_bytes:
                raise self._ended("killed_memory", f"{_gib(self.most_bytes)} resident, limit {_gib(self.limit_bytes)}")
            if monotonic() - self._began > self.cell.limit_s:
                raise self._ended("timed_out", f"not done within {self.cell.limit_s:g} s")
        try:
            message = self._connection.recv_bytes()
            return message if raw else json.loads(message)
        except (EOFError, ConnectionResetError):
            raise self._crashed() from None

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
        if self._process.is_alive():
            kill_tree(psutil.Process(self._process.pid))
        self._process.join(timeout=10)
        self._connection.close()
        Path(self._log).unlink(missing_ok=True)


def run(cell: Cell, limit_bytes: int, check_seeds: tuple[int, ...] = ()) -> tuple[Outcome, list[dict[str, Any]]]:
    """Measure a cell, then have it answer the check seeds, which it learns only now; the outcome and the answers."""
    if cell.need_bytes > limit_bytes:
        return Outcome(
            status="refused", reason=f"memory: {_gib(cell.need_bytes)} needed, limit {_gib(limit_bytes)}"
        ), []
    process = Process(cell, limit_bytes)
    process.start()
    answers: list[dict[str, Any]] = []
    try:
        outcome = _measured(process) if not cell.check_only else Outcome(status="refused", reason="only checked")
        if cell.kind != "trainer":
            for seed in check_seeds:
                process.ask(seed)
                answers.append(torch.load(io.BytesIO(process.answer(raw=True)), weights_only=True))
            process.ask(None)
        return outcome, answers
    except _EndedError as ended:
        return ended.outcome, []
    finally:
        process.stop()


def _measured(process: Process) -> Outcome:
    """Follow the timed region by the parent's own clock, then judge what the cell says about it."""
    assert process.answer() == "timing"
    began = monotonic()
    if process.cell.kind == "trainer":
        found = process.answer()
        found |= {"median_s": statistics.median(found["values_s"]), "slow_start": False, "tampered": False}
    else:
        busy_s = float(process.answer()["busy_s"])
        wall_s = monotonic() - began
        found = process.answer()
        if wall_s > CLOCK_FACTOR * busy_s + CLOCK_SLACK_S:
            return Outcome(
                status="refused", reason=f"the cell's clock says {busy_s:.2f} s, the parent's {wall_s:.2f} s"
            )
    if found["tampered"]:
        return Outcome(status="refused", reason="the timer shows less than the clock that no variant could reach")
    if found["slow_start"]:
        reason = (
            f"slow start: {found['details']['trial_s']:.3g} s a call while calibrating, {found['median_s']:.3g} s after"
        )
        return Outcome(status="refused", reason=reason)
    return Outcome(
        status="measured",
        values_s=tuple(found["values_s"]),
        median_s=found["median_s"],
        peak_bytes=found["peak_bytes"],
        details={**found["details"], "most_resident_bytes": process.most_bytes},
    )


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
