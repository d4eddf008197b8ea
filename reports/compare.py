"""Ratios and peaks against a recorded baseline: what got worse by more than the noise of both measurements."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports.records import Record

# The median of few rounds has a spread of its own: 1.25 standard errors of a mean, from the median absolute deviation.
MAD_TO_SIGMA, MEDIAN_FACTOR = 1.4826, 1.2533
# A second measurement has to agree, less clearly, since a false alarm would have to come twice.
SIGMAS, AGREEING_SIGMAS = 2.0, 1.5
# Below this a slow-down is not told from noise, however quiet the rounds happened to be.
FLOOR_LOG, FLOOR_FEW_ROUNDS_LOG, ENOUGH_ROUNDS = math.log(1.12), math.log(1.3), 3
# What lies between runs (where memory came to lie, say) no round of one run shows: it takes several recorded runs.
ENOUGH_RUNS = 3
PEAK_SHARE, PEAK_SLACK_BYTES = 0.15, 2**20
KEY_FIELDS = ("suite", "operator", "variant", "recipe", "case", "axes", "mode", "device", "dtype", "options")
TABLE_FIELDS = ("suite", "case", "axes", "mode", "device", "dtype")
Key = str


@dataclass(frozen=True)
class Excess:
    """One row that is worse than recorded, in words and by how much."""

    suite: str
    key: Key
    kind: str
    message: str


def key(record: Record) -> Key:
    """What a row is compared under."""
    return json.dumps({name: record.get(name) for name in KEY_FIELDS}, sort_keys=True)


def table_key(record: Record) -> Key:
    """The table that a row belongs to; a cumulative or engine table has no finer one."""
    return json.dumps({name: record.get(name) for name in TABLE_FIELDS}, sort_keys=True)


def with_null(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Compared rows with their table's null ratios and how far its null row's peak lies from the reference's."""
    found = list(records)
    tables: dict[Key, dict[str, Any]] = {}
    for record in found:
        entry = tables.setdefault(table_key(record), {"null_ratios": None, "peaks": []})
        if record.get("null"):
            entry["null_ratios"] = record.get("ratios")
        if record.get("null") or not record.get("ratios"):
            entry["peaks"].append(record["peak_bytes"])
    rows = []
    for record in found:
        if record.get("null") or not (record.get("ratio") or record["status"] != "measured"):
            continue
        entry = tables[table_key(record)]
        peaks = [peak for peak in entry["peaks"][:2] if peak is not None]
        spread = abs(peaks[0] - peaks[1]) if len(peaks) == 2 else 0
        kept = {name: record.get(name) for name in (*KEY_FIELDS, "status", "reason", "ratio", "ratios", "peak_bytes")}
        rows.append({**kept, "null_ratios": entry["null_ratios"], "null_peak_bytes": spread})
    return rows


def spread_log(ratios: Sequence[float] | None, centre: float) -> float:
    """Standard deviation of the median of the log ratios, from their median absolute deviation about a centre."""
    if not ratios:
        return 0.0
    deviation = statistics.median(abs(math.log(ratio) - centre) for ratio in ratios)
    return MEDIAN_FACTOR * MAD_TO_SIGMA * deviation / math.sqrt(len(ratios))


def noise_log(row: Mapping[str, Any]) -> float:
    """The larger of the null row's spread about 1 and the row's own about its median."""
    ratios = row.get("ratios") or []
    own = spread_log(ratios, statistics.median(map(math.log, ratios))) if ratios else 0.0
    return max(spread_log(row.get("null_ratios"), 0.0), own)


def between_runs_log(row: Mapping[str, Any]) -> float:
    """Standard deviation of the next run's log ratio about the recorded runs' centre; 0 while there are too few."""
    runs = [math.log(ratio) for ratio in row.get("runs") or ()]
    return statistics.stdev(runs) * math.sqrt(1 + 1 / len(runs)) if len(runs) >= ENOUGH_RUNS else 0.0


def threshold_log(before: Mapping[str, Any], now: Mapping[str, Any], sigmas: float = SIGMAS) -> float:
    """How far the log ratio may fall: the noise of both, or what lies between runs, never less than the floor."""
    rounds = min(len(before.get("ratios") or ()), len(now.get("ratios") or ()))
    floor = FLOOR_LOG if rounds >= ENOUGH_ROUNDS else FLOOR_FEW_ROUNDS_LOG
    small_sample = 1 + 1 / max(1, rounds)
    within = small_sample * math.hypot(noise_log(before), noise_log(now))
    return max(floor, sigmas * within, sigmas * between_runs_log(before))


def with_run(row: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded row with one more run: the ratio is the runs' median, the peak the highest seen."""
    runs = [*(row.get("runs") or [row["ratio"]]), run["ratio"]]
    peaks = [peak for peak in (row.get("peak_bytes"), run.get("peak_bytes")) if peak is not None]
    return {
        **run,
        "runs": runs,
        "ratio": statistics.median(runs),
        "peak_bytes": max(peaks, default=None),
        "null_peak_bytes": max(row["null_peak_bytes"], run["null_peak_bytes"]),
    }


def worse(
    before: Iterable[Mapping[str, Any]], now: Iterable[Mapping[str, Any]], sigmas: float = SIGMAS
) -> list[Excess]:
    """Rows slower or hungrier than recorded, and recorded rows that have no number any more."""
    recorded = {key(row): row for row in before}
    found = []
    for row in now:
        name = key(row)
        if name in recorded and recorded[name].get("ratio"):
            found += _worse(recorded[name], row, name, sigmas)
    return found


def _worse(before: Mapping[str, Any], now: Mapping[str, Any], name: Key, sigmas: float) -> list[Excess]:
    label = f"{now['suite']}: {now['operator']}/{now['variant']} {now['mode']} {json.dumps(now['axes'])}"
    if not now.get("ratio"):
        words = f"{label} had ×{before['ratio']:.3g} and is now {now['status']}: {now['reason']}"
        return [Excess(now["suite"], name, "lost", words)]
    found = []
    fall, allowed = math.log(before["ratio"] / now["ratio"]), threshold_log(before, now, sigmas)
    if fall > allowed:
        slower, noise = 100 * math.expm1(fall), 100 * math.expm1(allowed)
        words = f"{label} fell from ×{before['ratio']:.3g} to ×{now['ratio']:.3g}, {slower:.0f} % slower"
        words += f"; noise allows {noise:.0f} %"
        found.append(Excess(now["suite"], name, "slower", words))
    old, new = before.get("peak_bytes"), now.get("peak_bytes")
    if old is not None and new is not None:
        slack = max(PEAK_SHARE * old, before["null_peak_bytes"], now["null_peak_bytes"]) + PEAK_SLACK_BYTES
        if new - old > slack:
            found.append(
                Excess(now["suite"], name, "hungrier", f"{label} grew from {old / 2**20:.1f} to {new / 2**20:.1f} MiB")
            )
    return found


def confirmed(
    first: Sequence[Excess], again: Sequence[Excess], measured_again: set[Key]
) -> tuple[list[Excess], list[Excess]]:
    """Excesses that a second measurement shows as well, and those that were not measured again yet."""
    seen = {(excess.key, excess.kind) for excess in again}
    both = [e for e in first if (e.key, e.kind) in seen]
    return both, [e for e in first if e.key not in measured_again]
