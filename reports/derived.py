"""What follows from measured rates by arithmetic alone: time to finish a shard, time to train a number of tokens."""

from __future__ import annotations

import json
from pathlib import Path

from reports.records import Record, Records
from reports.text import duration, rate, table

BUDGETS = ((10e6, "10M", "Proof of concept"), (50e6, "50M", "Basic text generation"), (100e6, "100M", "Decent model"),
           (500e6, "500M", "Competent model"), (1.76e9, "1.76B", "Full Chinchilla"))  # fmt: skip


def rates(records: Records) -> list[tuple[str, float]]:
    """Name and tokens a second of every measured 1B row; of the small engine's where no 1B row was measured."""
    for suite in ("engine_1b", "trainer", "engine"):
        found = [r for r in records.of(suite) if r["status"] == "measured" and not r.get("null")]
        if found:
            return [(_name(r), r["axes"]["B"] * r["axes"]["C"] / r["median_s"]) for r in found]
    return []


def _name(record: Record) -> str:
    return f"{record['suite']} {record['variant']}, B={record['axes']['B']}, {record['device']}"


def time_to_finish(records: Records, position: int) -> str:
    """``remaining / rate`` for one pass over a shard as long as the fetch suite's, from a position."""
    shard = max((r["axes"]["L"] for r in records.of("data_fetch")), default=0)
    if not shard or not rates(records):
        return ""
    rows = []
    for name, tokens_per_s in rates(records):
        rows.append(
            [name, rate(tokens_per_s, 1.0), f"{shard:,}", f"{position:,}", duration((shard - position) / tokens_per_s)]
        )
    return table(["Measured on", "tok/s", "Shard tokens", "Position", "Time to finish one pass"], rows)


def time_to_train(records: Records) -> str:
    """Wall-clock time to train growing numbers of tokens at each measured rate."""
    found = rates(records)
    if not found:
        return ""
    rows = [[short, *(duration(tokens / per_s) for _, per_s in found), purpose] for tokens, short, purpose in BUDGETS]
    return table(["Tokens", *(f"{name} ({rate(per_s, 1.0)} tok/s)" for name, per_s in found), "Purpose"], rows)


def position(metrics: Path) -> int:
    """The next token of a run's metrics, 0 where there are none."""
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    return int(json.loads(lines[-1])["token"]) if lines else 0
