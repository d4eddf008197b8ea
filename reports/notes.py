"""The honest reading of a table, by rules: what is slower than its reference, what did not fit, how noisy it was."""

from __future__ import annotations

from collections.abc import Iterable

from reports.records import Record, Records
from reports.tables import label, sizes
from reports.text import percent, times

# Below this a ratio is called slower; the null row's own distance from 1 is added to it.
SLOWER = 0.97
CLOSE_TO_FLOOR = 2.0


def notes(records: Iterable[Record]) -> list[str]:
    """One sentence a fact, in a fixed order."""
    found = list(records)
    noise = null_noise(found)
    lines = [_noise(found)] if any(r.get("null") and r["status"] == "measured" for r in found) else []
    for record in found:
        if record.get("null"):
            continue
        where = f"`{label(record)}` at {sizes(record)}, {record['mode'].replace('_', ' + ')}"
        if record["status"] == "killed_memory":
            lines.append(f"{where}, did not fit: {record['reason']}.")
        elif record["status"] != "measured":
            lines.append(f"{where}, has no number: {record['status'].replace('_', ' ')}, {record['reason']}.")
        elif record.get("ratio") is not None and record["ratio"] < SLOWER / (1 + noise):
            lines.append(f"{where}, is slower than its reference here: {times(record['ratio'])}.")
        elif record["floor_s"] and record["median_s"] / record["floor_s"] < CLOSE_TO_FLOOR:
            lines.append(
                f"{where}, takes {times(record['median_s'] / record['floor_s'])} of the least time this machine allows."
            )
    return lines


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
