"""One markdown table a suite, with the columns of the original's own tables and what a comparison needs beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

from reports.records import Record, Records
from reports.text import DASH, ms, percent, rate, size, table, times

TITLES = {
    "attention": "Attention at the shapes of the records, carry active",
    "cross_entropy": "Cross-entropy of the tied head",
    "moe": "Phase-routed mixture of experts",
    "sampler": "Sampling from the head",
    "data_fetch": "Fetching tokens from a shard",
    "block": "One CTE block, with the recipe's attention and experts inside",
    "optimizer_step": "Clip and update",
    "engine": "Engine end to end, training steps",
    "engine_1b": "Full 1B configuration, training steps",
    "trainer": "Complete trainer, scheduled-sampling branch included",
    "scaling": "Batch size scaling",
    "breakdown": "Where the time of a step goes",
    "cumulative": "Combined speed-up, one optimisation added a row",
}
WORDS = {"killed_memory": "killed: memory", "timed_out": "timed out", "crashed": "crashed", "refused": "refused"}


def state(record: Record) -> str:
    """Why there is no number: the status, and what a refusal is about."""
    if record["status"] != "refused":
        return WORDS[record["status"]]
    return f"refused: {str(record.get('reason', '')).partition(':')[0]}"


def label(record: Record) -> str:
    """The row's name: a variant with its options, the null row marked."""
    null = " (null: against itself)" if record.get("null") else ""
    unproven = "" if record.get("proven", True) else " (not proven)"
    dtype = "" if record["dtype"] == "float32" else f" {record['dtype']}"
    return f"{record['variant']}{dtype}{null}{unproven}"


def sizes(record: Record) -> str:
    """``B=2, G=80, ...``."""
    return ", ".join(f"{letter}={value}" for letter, value in record["axes"].items())


def of_floor(record: Record) -> str:
    """How many times the machine's floor the row takes."""
    floor = record["floor_s"]
    return times(record["median_s"] / floor) if floor and record["median_s"] else DASH


def operators(records: Iterable[Record]) -> str:
    """Rows of variants at one or more shapes: both modes side by side."""
    rows = []
    for _, group in groupby(_by_row(records), key=_row_key):
        modes = {record["mode"]: record for record in group}
        first = next(iter(modes.values()))
        forward, backward = modes.get("forward", modes.get("step")), modes.get("forward_backward")
        cells = [label(first), sizes(first)]
        for record in (forward, backward):
            cells += _timed(record)
            cells.append(size(record["peak_bytes"]) if record else DASH)
        rows.append(cells)
    columns = ["Variant", "Sizes", "fwd ms", "× ref", "× floor", "Peak", "fwd+bwd ms", "× ref", "× floor", "Peak"]
    return table(columns, rows)


def _timed(record: Record | None) -> list[str]:
    if record is None:
        return [DASH] * 3
    if record["status"] != "measured":
        return [state(record), DASH, DASH]
    return [ms(record["median_s"]), times(record.get("ratio")), of_floor(record)]


def _row_key(record: Record) -> tuple[str, ...]:
    return (record["case"], sizes(record), record["variant"], str(record.get("null")), record["dtype"])


def _by_row(records: Iterable[Record]) -> list[Record]:
    """In the order of the records, the modes of a row brought together."""
    order: dict[tuple[str, ...], int] = {}
    found = list(records)
    for record in found:
        order.setdefault(_row_key(record), len(order))
    return sorted(found, key=lambda record: order[_row_key(record)])


def data_fetch(records: Iterable[Record]) -> str:
    """Microseconds a fetch and what all processes hold together."""
    rows = []
    for record in records:
        axes = record["axes"]
        number = state(record) if record["status"] != "measured" else f"{record['median_s'] * 1e6:.1f}"
        rows.append(
            [
                label(record),
                str(axes["P"]),
                f"{axes['L']:,}",
                number,
                times(record.get("ratio")),
                of_floor(record),
                size(record["peak_bytes"]),
            ]
        )
    return table(["Variant", "Processes", "Shard tokens", "µs a fetch", "× ref", "× floor", "Resident, all"], rows)


def engines(records: Iterable[Record]) -> str:
    """Tokens a second and peak bytes, a row a recipe."""
    rows = []
    for record in records:
        tokens = record["axes"]["B"] * record["axes"]["C"]
        number = state(record) if record["status"] != "measured" else rate(tokens, record["median_s"])
        steps = str(len(record["values_s"] or ()))
        most = size((record.get("details") or {}).get("most_resident_bytes"))
        cells = [label(record), sizes(record), number, ms(record["median_s"]), times(record.get("ratio"))]
        rows.append([*cells, size(record["peak_bytes"]), most, steps])
    return table(
        ["Recipe", "Sizes", "tok/s", "ms a step", "× ref", "Peak of a step", "Most resident", "Steps timed"], rows
    )


def scaling(records: Iterable[Record]) -> str:
    """Tokens a second by batch, and how many times those of the smallest."""
    found = list(records)
    base = next((r["axes"]["B"] * r["axes"]["C"] / r["median_s"] for r in found if r["median_s"]), None)
    rows = []
    for record in found:
        tokens = record["axes"]["B"] * record["axes"]["C"]
        per_s = tokens / record["median_s"] if record["median_s"] else None
        number = state(record) if per_s is None else rate(tokens, record["median_s"])
        rows.append(
            [
                str(record["axes"]["B"]),
                number,
                times(per_s / base if per_s and base else None),
                size(record["peak_bytes"]),
            ]
        )
    return table(["Batch", "tok/s", "Speed-up vs the first", "Peak"], rows)


def breakdown(records: Iterable[Record]) -> str:
    """The parts of a step, then the components of its forward pass with what they leave."""
    found = list(records)
    step = [r for r in found if r["case"] == "step"]
    inner = [r for r in found if r["case"] == "forward"]
    forward_s = next((r["median_s"] for r in step if r["operator"] == "forward"), None)
    total_s = sum(r["median_s"] or 0.0 for r in step if r["operator"] != "clip")
    rows = [
        [_part(r), ms(r["median_s"]), percent(r["median_s"] / total_s) if r["median_s"] and total_s else DASH]
        for r in step
    ]
    rows.append(["**Total an iteration**", ms(total_s), percent(1)])
    below = [
        [r["operator"], ms(r["median_s"]), percent(r["median_s"] / forward_s) if r["median_s"] and forward_s else DASH]
        for r in inner
    ]
    if forward_s is not None:
        rest_s = forward_s - sum(r["median_s"] or 0.0 for r in inner)
        below.append(["everything else (forward less the above)", ms(rest_s), percent(rest_s / forward_s)])
    titles = f"{sizes(found[0])}, recipe {found[0]['recipe']}" if found else ""
    return "\n\n".join(
        [titles, table(["Phase", "ms", "% of total"], rows), table(["Forward component", "ms", "% of forward"], below)]
    )


def _part(record: Record) -> str:
    names = {"clip": "of which clip, measured alone", "optimizer_step": "Clip and optimizer"}
    name: str = names.get(record["operator"], str(record["operator"]).capitalize())
    return name


def cumulative(records: Iterable[Record]) -> str:
    """The stack: what each row adds to the one above, and the speed-up of all so far."""
    rows = []
    before: float | None = None
    for record in (r for r in records if not r.get("null")):
        name = f"+ {record['variant'].rpartition(',')[2]}" if "," in record["variant"] else record["variant"]
        step = before / record["median_s"] if before and record["median_s"] else None
        number = (
            state(record)
            if record["status"] != "measured"
            else rate(record["axes"]["B"] * record["axes"]["C"], record["median_s"])
        )
        combined = times(record.get("ratio")) if "," in record["variant"] else "×1"
        rows.append([name, number, times(step), combined, size(record["peak_bytes"])])
        before = record["median_s"]
    return table(["Optimisation", "tok/s", "× the row above", "Combined", "Peak"], rows)


RENDERERS: dict[str, Callable[[Iterable[Record]], str]] = {
    "data_fetch": data_fetch,
    "engine": engines,
    "engine_1b": engines,
    "trainer": engines,
    "scaling": scaling,
    "breakdown": breakdown,
    "cumulative": cumulative,
}


def suite(records: Records, name: str, device: str) -> str:
    """A suite's table on a device class; empty when it was not measured there."""
    found = records.of(name, device)
    return RENDERERS.get(name, operators)(found) if found else ""
