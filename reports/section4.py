"""``SECTION4.md``: the measured results in the order of the original's section 4, every number from the records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reports import derived, notes, tables
from reports.records import SUITES, Records
from reports.text import page, size


def section4(records: Records, position: int) -> str:
    """All suites, a heading a device class and a suite, each with its honest reading."""
    parts = [_environment(environment) for environment in records.environments()]
    for device in records.devices():
        parts.append(f"## Measured on {device}")
        for name in SUITES:
            found = tables.suite(records, name, device)
            if found:
                parts += [f"### {tables.TITLES[name]}", found, reading(records, name, device)]
    parts += ["## Derived from the measured rates", _derived(records, position)]
    parts += [
        "## Not measured",
        bullets([*notes.not_measured(records), *absent(records)]) or "Every suite has its records.",
    ]
    return page("4. Measured results", INTRODUCTION, *parts, foot=foot(records))


INTRODUCTION = (
    "Each cell ran in a process of its own under limits of time and memory. Rows of a table took turns, one alone "
    "computing at any time, in one or more rounds of fresh processes; `× ref` is the median, over turns and then over "
    "rounds, of the reference's time over the row's in the same turn. The null row is the reference measured as if it "
    "were a variant. `× floor` is how many times longer the row takes than the machine's measured rates of matmul and "
    "copy allow. Peak is above inputs, in a region of its own. Operators are timed with a heap that keeps freed "
    "blocks below 32 MiB, so that no call pays for page faults by chance."
)


def reading(records: Records, name: str, device: str) -> str:
    """The notes of a suite as a list."""
    lines = notes.notes(records.of(name, device))
    return f"Honest reading:\n\n{bullets(lines)}" if lines else ""


def bullets(lines: list[str]) -> str:
    """A markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def absent(records: Records) -> list[str]:
    """Suites without records."""
    return [
        f"No records of `{name}`: `python -m benchmarks --suite {name}`." for name in SUITES if not records.of(name)
    ]


def suite_page(records: Records, name: str) -> str:
    """One suite's own page; empty when it was measured nowhere."""
    parts = []
    for device in records.devices():
        found = tables.suite(records, name, device)
        parts += [f"## {device}", found, reading(records, name, device)] if found else []
    return page(tables.TITLES[name], *parts, foot=foot(records, name)) if parts else ""


def foot(records: Records, name: str | None = None) -> str:
    """The hash of the records that a page is made of."""
    return f"Records SHA-256 `{records.sha256(None if name is None else [name])}`"


def _derived(records: Records, position: int) -> str:
    finish, train = derived.time_to_finish(records, position), derived.time_to_train(records)
    if not finish and not train:
        return "Nothing: no engine was measured."
    parts = [
        "`days = remaining / (tok/s * 86,400)` for one pass of one process over its own shard.",
        finish,
        "Time to train from nothing:",
        train,
    ]
    return "\n\n".join(part for part in parts if part)


def _environment(environment: Mapping[str, Any]) -> str:
    rates = environment.get("rates") or {}
    lines = [
        f"{environment.get('device', 'cpu')}, {environment.get('cores', '?')} cores, "
        f"{environment.get('threads', '?')} threads, {size(environment.get('memory_bytes'))} memory, "
        f"torch {environment.get('torch', '?')}, Python {environment.get('python', '?')}"
    ]
    for key, value in sorted(rates.items()):
        if key.endswith("operations_per_s"):
            lines.append(
                f"{key.removeprefix('matmul_').removesuffix('_operations_per_s')} matmul {value / 1e9:,.1f} GFLOP/s"
            )
    if "copy_bytes_per_s" in rates:
        lines.append(f"copy {rates['copy_bytes_per_s'] / 1e9:,.1f} GB/s, read and write")
    return bullets(lines)
