"""Plots as SVG with the same bytes for the same records: speed-up, memory against batch, budget used, loss."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from registry import Ledger
from registry.static import StaticCatalogue
from reports.records import Record, Records

# The size that tells a table's rows from those of the suite's other tables: processes, batch, or rows of a head.
SIZE = ("P", "B", "N", "rows")


def plots(records: Records, ledger: Ledger, catalogue: StaticCatalogue, losses: Mapping[str, Path]) -> dict[str, str]:
    """SVG text by file name; only of what there is."""
    found = {
        "speedup.svg": drawn(lambda axes: _speedup(axes, records)),
        "memory.svg": drawn(lambda axes: _memory(axes, records)),
        "budget.svg": drawn(lambda axes: _budget(axes, ledger, catalogue)),
        "loss.svg": drawn(lambda axes: _loss(axes, losses)),
    }
    return {name: svg for name, svg in found.items() if svg}


def drawn(draw: Callable[[Any], bool]) -> str:
    """SVG text of one figure; empty when ``draw`` says that there is nothing to show."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(
        {"svg.hashsalt": "fractus", "svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3}
    ):
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        buffer = io.StringIO()
        if draw(axes):
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return buffer.getvalue()


def _speedup(axes: Any, records: Records) -> bool:
    rows = [
        r
        for d in records.documents
        for r in d.records
        if r.get("ratio") and not r.get("null") and "," not in r["variant"]
    ]
    best: dict[str, float] = {}
    for record in rows:
        size = next((f" {letter}={record['axes'][letter]}" for letter in SIZE if letter in record["axes"]), "")
        best[_name(record) + size] = record["ratio"]
    names = sorted(best, reverse=True)
    axes.barh(names, [best[name] for name in names], color=["tab:green" if best[n] >= 1 else "tab:red" for n in names])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("times as fast as the reference, same rounds")
    axes.tick_params(axis="y", labelsize=6)
    return bool(best)


def _name(record: Record) -> str:
    """By suite: a recipe's rows of one engine are not those of another."""
    mode = record["mode"].replace("forward_backward", "fwd+bwd")
    return f"{record['suite']}: {record['variant']} {mode} {record['device']}"


def _memory(axes: Any, records: Records) -> bool:
    lines: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for record in (
        r
        for r in [*records.of("attention"), *records.of("scaling"), *records.of("engine_1b")]
        if r["peak_bytes"] and not r.get("null")
    ):
        lines[_name(record)].append((record["axes"]["B"], record["peak_bytes"]))
    for name, points in sorted(lines.items()):
        batches, peaks = zip(*sorted(points), strict=True)
        axes.plot(batches, [peak / 2**20 for peak in peaks], marker="o", label=name)
    axes.set_yscale("log")
    axes.set_xlabel("batch B")
    axes.set_ylabel("peak MiB above inputs")
    if lines:
        axes.legend(fontsize=6)
    return bool(lines)


def _budget(axes: Any, ledger: Ledger, catalogue: StaticCatalogue) -> bool:
    used: dict[str, float] = {}
    for operator in catalogue.operators:
        for proof in ledger.records(operator).values():
            if proof.budget_used is not None and proof.status == "passed":
                key = f"{operator}/{proof.variant} {proof.property}"
                used[key] = max(used.get(key, 0.0), proof.budget_used)
    names = sorted((name for name in used if used[name] > 0), key=lambda name: used[name])[-40:]
    axes.barh(names, [used[name] for name in names])
    axes.axvline(1.0, color="tab:red", linewidth=1)
    axes.set_xlabel("largest part of the error budget used")
    axes.tick_params(axis="y", labelsize=5)
    return bool(names)


def _loss(axes: Any, losses: Mapping[str, Path]) -> bool:
    for name, path in losses.items():
        lines: list[Record] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for key in ("ema_tf", "ema_ss"):
            points = [(line["step"], line[key]) for line in lines if line[key] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=f"{name} {key}")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy")
    if losses:
        axes.legend()
    return bool(losses)
