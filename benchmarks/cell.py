"""The measuring process: runs one cell for the parent and answers on a pipe of its own; stdout goes to a log.

A variant's exception ends the process; the parent reads the traceback from the log.
"""

from __future__ import annotations

import gc
import io
import json
import os
import statistics
from multiprocessing.connection import Connection
from typing import Any

import torch

import fractus.continuous_engine  # preloaded once by the fork server, so that a fresh process costs little
from benchmarks import floors, memory, timing
from benchmarks.engines import EngineWork, PartWork
from benchmarks.fetch import FETCHES, FetchWork
from benchmarks.spec import Cell
from benchmarks.training import train
from benchmarks.work import OperatorWork
from registry import load

PEAKS, SHORT_S = 3, 0.2
WORKS: dict[str, type[Any]] = {"operator": OperatorWork, "fetch": FetchWork, "engine": EngineWork, "part": PartWork}


def serve(connection: Connection, entry: dict[str, Any], log: str) -> None:
    """Run the cell: calibrate, wait for every turn, then for the end of all turns; the numbers, then every check."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    gc.freeze()  # what the fork server loaded is no garbage: collections need not walk it
    cell = Cell.from_json(entry)
    torch.set_num_threads(cell.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    if cell.kind == "rates":
        tell(connection, {"rates": floors.machine_rates(cell.device)})
        return
    if cell.kind == "trainer":
        tell(connection, "timing")
        tell(connection, train(cell))
        return
    if cell.kind == "operator":  # engines and the trainer are measured with the allocator that they run with
        memory.keep_freed_memory()
    work = WORKS[cell.kind](load(plugins=cell.plugins), cell)
    if not cell.check_only:
        _measure(connection, cell, work)
    while (seed := json.loads(connection.recv_bytes())) is not None:
        buffer = io.BytesIO()
        torch.save(work.check(seed), buffer)
        connection.send_bytes(buffer.getvalue())
    work.close()


def _measure(connection: Connection, cell: Cell, work: Any) -> None:
    work.item(0)  # the base draws are made before the clock of the timed region starts
    tell(connection, "timing")

    def wait() -> None:
        tell(connection, "turn")
        connection.recv_bytes()

    timed = timing.measure(
        work, budget_s=cell.budget_s, device=cell.device, turns=cell.turns, pinned=cell.pinned, wait=wait
    )
    tell(connection, {"busy_s": timed.busy_s})
    connection.recv_bytes()  # the other processes' last turns
    per_call = FETCHES if cell.kind == "fetch" else 1
    values = [value / per_call for value in timed.values_s]
    peak = work.resident_bytes() if cell.kind == "fetch" else _peak_bytes(work, cell, timed.trial_s)
    found = {
        "values_s": values,
        "median_s": statistics.median(values),
        "peak_bytes": peak,
        "slow_start": timed.slow_start,
        "tampered": timed.tampered,
    }
    details = {"calls_a_value": timed.calls * per_call, "trial_s": timed.trial_s / per_call}
    tell(connection, {**found, "details": details})


def _peak_bytes(work: Any, cell: Cell, call_s: float) -> int | None:
    """Peak of a call; of a short one the median of a few, as buffers of libraries come and go between calls."""
    calls = PEAKS if call_s < SHORT_S else 1
    peaks = [memory.peak_of(work.memory_call(), cell.device) for _ in range(calls)]
    known = [peak for peak in peaks if peak is not None]
    return int(statistics.median(known)) if known else None


def tell(connection: Connection, message: Any) -> None:
    """Send a message as JSON: the parent unpickles nothing that this process writes."""
    connection.send_bytes(json.dumps(message).encode())


__all__ = ["fractus", "serve"]
