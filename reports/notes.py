"""The honest reading of a table, by rules: what is slower than its reference, what did not fit, how noisy it was."""

from __future__ import annotations

from collections.abc import Iterable

from reports.records import Record, Records
from reports.tables import label, sizes
from reports.text import percent, times

# Below this a ratio is called slower; the null row's own distance from 1 is added to it.
SLOWER = 0.97
CLOSE_TO_FLOOR = 2.0
# Peaks nearer than this are called the same.
SAME_PEAK = 0.1


def notes(records: Iterable[Record]) -> list[str]:
    """One sentence a fact, in a fixed order: the noise, what is fastest, then what each row has to say."""
    found = list(records)
    noise = null_noise(found)
    lines = [_noise(found)] if any(r.get("null") and r["status"] == "measured" for r in found) else []
    references = _references(found)
    lines += _fastest(found, references, noise)
    for record in found:
        if record.get("null"):
            continue
        where = f"`{label(record)}` at {_place(record)}"
        if record["status"] == "killed_memory":
            lines.append(f"{where}, did not fit: {record['reason']}.")
        elif record["status"] != "measured":
            lines.append(f"{where}, has no number: {record['status'].replace('_', ' ')}, {record['reason']}.")
        elif record.get("ratio") is not None and record["ratio"] < SLOWER / (1 + noise):
            share = _peak_share(record, references)
            lines.append(f"{where}, is slower than its reference here: {times(record['ratio'])}{share}.")
        elif record.get("ratio") is not None and _share(record, references) > 1 + SAME_PEAK:
            lines.append(f"{where}, needs {percent(_share(record, references))} of its reference's peak memory.")
        elif record["floor_s"] and record["median_s"] / record["floor_s"] < CLOSE_TO_FLOOR:
            lines.append(
                f"{where}, takes {times(record['median_s'] / record['floor_s'])} of the least time this machine allows."
            )
    return lines


def _place(record: Record) -> str:
    return f"{sizes(record)}, {record['mode'].replace('_', ' + ')}"


def _references(records: Iterable[Record]) -> dict[str, Record]:
    """The first row of each table, which the others are compared with."""
    found: dict[str, Record] = {}
    for record in records:
        if not record.get("null") and record.get("ratio") is None:
            found.setdefault(_place(record), record)
    return found


def _fastest(records: Iterable[Record], references: dict[str, Record], noise: float) -> list[str]:
    """The fastest row of each table, where it is faster than its reference by more than the noise."""
    best: dict[str, Record] = {}
    for record in records:
        # A stack's last row is all of it, not one among others.
        ratio = record.get("ratio") if not record.get("null") and record["suite"] != "cumulative" else None
        place = _place(record)
        if ratio is None or ratio * SLOWER <= 1 + noise or place not in references:
            continue
        if place not in best or ratio > best[place]["ratio"]:
            best[place] = record
    return [
        f"Fastest at {place}: `{label(record)}`, {times(record['ratio'])} the speed of "
        f"`{references[place]['variant']}`{_peak_share(record, references)}."
        for place, record in best.items()
    ]


def _share(record: Record, references: dict[str, Record]) -> float:
    """Its peak over its reference's; 1 where one of them was not measured."""
    peak, whole = record["peak_bytes"], references.get(_place(record), {}).get("peak_bytes")
    return 1.0 if peak is None or not whole else peak / whole


def _peak_share(record: Record, references: dict[str, Record]) -> str:
    """The share in words, where it is not nearly 1."""
    share = _share(record, references)
    return "" if abs(share - 1) <= SAME_PEAK else f", with {percent(share)} of its peak memory"


def null_noise(records: Iterable[Record]) -> float:
    """The largest distance from 1 of any null row's ratio."""
    distances = [abs(r["ratio"] - 1) for r in records if r.get("null") and r.get("ratio") is not None]
    return max(distances, default=0.0)


def _noise(records: list[Record]) -> str:
    each = [abs(x - 1) for r in records if r.get("null") and r.get("ratios") for x in r["ratios"]]
    return (
        f"Noise: the reference against itself differs by up to {percent(null_noise(records))} in the median of rounds, "
        f"{percent(max(each, default=0.0))} in a single round."
    )


def not_measured(records: Records) -> list[str]:
    """What the records do not hold at all."""
    lines = []
    if not any(device.startswith("cuda") for device in records.devices()):
        lines.append(
            "Not yet measured on CUDA. Times here do not carry over to it; `benchmarks/device.sh` measures there."
        )
    profiles = {document.profile for document in records.documents}
    if "quick" in profiles:
        quick = sorted({d.place[0] for d in records.documents if d.profile == "quick"})
        lines.append(f"Small sizes only (quick profile): {', '.join(quick)}.")
    return lines
