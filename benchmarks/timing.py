"""The clock: pytest-benchmark times batches of inputs that were drawn outside the timed region and never come twice.

A batch is a turn: where several processes are measured together, each waits for its turn before it draws and runs, so
that one alone computes at any time and a machine that slows down for a second slows all of them.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import pytest
import pytest_benchmark.plugin

TURN_S = 0.02
BATCH_BYTES = 256 * 2**20
# Whatever ran in between leaves cold caches and sleeping threads: a call that is not long comes once before its turn.
WARM_BELOW_S = 0.1
TRIALS = 3
TRIAL_BUDGET_S = 0.8
# Calls before the timed ones may be slower by caches and page faults, not by this factor; a call alone of a few
# microseconds is mostly cold caches and a busy machine, so that it has this slack on top.
SLOW_START = 4.0
SINGLE_SLACK_S = 5e-3
LEAST_SHOWN = 0.7
# pytest's own plug-ins that a single test does without; some collect garbage over all of torch.
UNUSED = ("cacheprovider", "unraisableexception", "threadexception", "doctest", "junitxml", "faulthandler", "pastebin")


class Work(Protocol):
    """A workload: inputs by index, drawn outside the timed region, and the call that is timed."""

    def item(self, index: int) -> Any:
        """Fresh inputs; another index gives other ones."""

    def call(self, item: Any) -> Any:
        """What is timed."""

    def item_bytes(self) -> int:
        """About how much one item holds."""


@dataclass(frozen=True)
class Timed:
    """Seconds a call, one a turn; how many calls a turn had, what calibration saw before, and the cell's own clocks.

    ``run_s`` is how long the timed calls took by a clock that was bound before any variant was loaded, ``busy_s`` all
    of the measurement by it: less in ``values_s`` than in ``run_s`` is a timer that was tampered with.
    """

    values_s: tuple[float, ...]
    calls: int
    trial_s: float
    slow_start: bool
    run_s: float
    busy_s: float

    @property
    def tampered(self) -> bool:
        """Whether the timer shows clearly less than the cell's own clock."""
        return sum(self.values_s) * self.calls < LEAST_SHOWN * self.run_s


class Walk:
    """Hands out batches of fresh items and runs them; counts so that no item comes twice in a process."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.next = 0
        self.batch_calls = 1
        self.wait: Callable[[], None] | None = None
        self.warm = False
        self.run_s = 0.0
        self.error: BaseException | None = None

    def batch(self) -> tuple[tuple[list[Any]], dict[str, Any]]:
        """The next batch, as pytest-benchmark's ``setup`` wants it, drawn when it is this process's turn."""
        if self.wait is not None:
            self.wait()
        if self.warm:
            self.work.call(self.work.item(self.next))
            self.next += 1
        items = [self.work.item(self.next + offset) for offset in range(self.batch_calls)]
        self.next += self.batch_calls
        return (items,), {}

    def run(self, items: list[Any]) -> None:
        """The timed function: one call an item, each result dropped before the next call."""
        began = perf_counter()
        for item in items:
            self.work.call(item)
        self.run_s += perf_counter() - began

    def trial_s(self, clock: Callable[[], float]) -> float:
        """Seconds a call of one batch of fresh items, by the same clock."""
        (items,), _ = self.batch()
        began = clock()
        self.run(items)
        return (clock() - began) / self.batch_calls


class _Entry:
    """The pytest plug-in that hands the walk to the one test below."""

    def __init__(self, walk: Walk, rounds: int) -> None:
        self.walk, self.rounds = walk, rounds
        self.values_s: list[float] = []

    @pytest.fixture
    def entry(self) -> _Entry:
        """This object."""
        return self


def test_cell(benchmark: Any, entry: _Entry) -> None:
    """Run under pytest by ``measure``: the fixture times every round and keeps its raw values."""
    walk = entry.walk
    try:
        benchmark.pedantic(walk.run, setup=walk.batch, rounds=entry.rounds, iterations=1)
    except Exception as error:
        walk.error = error
        raise
    entry.values_s = [float(value) for value in benchmark.stats.stats.data]


def cpu_clock() -> float:
    """Seconds, by the clock as it was before any variant was loaded."""
    return perf_counter()


def cuda_clock() -> float:
    """Seconds by CUDA events, every stream waited for, so that work left on a side stream is in."""
    import torch

    torch.cuda.synchronize()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    event.synchronize()
    base = _BASE_EVENT.setdefault("event", event)
    return float(base.elapsed_time(event)) / 1e3


_BASE_EVENT: dict[str, Any] = {}


def measure(
    work: Work,
    *,
    budget_s: float,
    device: str,
    turns: int,
    pinned: bool = False,
    wait: Callable[[], None] | None = None,
) -> Timed:
    """Calibrate on a few calls, then let pytest-benchmark time so many turns, ``budget_s`` in all at most.

    ``pinned`` makes a turn one call; ``wait`` returns when a turn may begin.
    ``slow_start`` says that the calls calibration saw were several times slower than the later ones: a
    calibration that was cheated, not a cold cache.
    """
    clock = cuda_clock if device.startswith("cuda") else cpu_clock
    walk, began = Walk(work), perf_counter()
    first_s = walk.trial_s(clock)
    # The first call is not counted, unless it alone takes longer than calibration may.
    single_s, enough = _calibrate(walk, clock) if first_s < TRIAL_BUDGET_S else (first_s, False)
    room = max(1, BATCH_BYTES // max(1, work.item_bytes()))
    turn_s = min(TURN_S, budget_s / turns)
    walk.batch_calls = 1 if pinned else min(max(1, math.ceil(turn_s / single_s)), room, 512)
    trial_s = _calibrate(walk, clock)[0] if walk.batch_calls > 1 else single_s
    walk.run_s, walk.wait, walk.warm = 0.0, wait, trial_s < WARM_BELOW_S and not pinned
    values = _run_pytest(walk, turns, f"{__name__}.{clock.__name__}")
    per_call = tuple(value / walk.batch_calls for value in values)
    late_s = SLOW_START * statistics.median(per_call)
    slow = enough and (trial_s > late_s or single_s > late_s + SINGLE_SLACK_S)
    shown_s = max(single_s, trial_s) if slow else trial_s
    return Timed(per_call, walk.batch_calls, shown_s, slow, walk.run_s, perf_counter() - began)


def _calibrate(walk: Walk, clock: Callable[[], float]) -> tuple[float, bool]:
    """Median seconds a call of a few batches, and whether they were enough to judge by."""
    trials: list[float] = []
    while len(trials) < TRIALS and (not trials or sum(trials) * walk.batch_calls < TRIAL_BUDGET_S):
        trials.append(walk.trial_s(clock))
    return max(statistics.median(trials), 1e-9), len(trials) == TRIALS


def _run_pytest(walk: Walk, rounds: int, clock: str) -> list[float]:
    entry = _Entry(walk, rounds)
    options = ["-q", "-s", "-c", os.devnull, "--noconftest", "--assert=plain", "--capture=no"]
    options += [part for name in UNUSED for part in ("-p", f"no:{name}")]
    options += ["--benchmark-disable-gc", "--benchmark-quiet", f"--benchmark-timer={clock}"]
    # Other plug-ins are not loaded: they would cost each cell more than it measures.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    code = pytest.main([*options, f"{__file__}::test_cell"], plugins=[pytest_benchmark.plugin, entry])
    if walk.error is not None:
        raise walk.error
    if code != pytest.ExitCode.OK or not entry.values_s:
        raise RuntimeError(f"pytest-benchmark ended with {code!r} and {len(entry.values_s)} values")
    return entry.values_s
