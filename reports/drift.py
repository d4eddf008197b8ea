"""The drift of a long carry against float64: runs of ``python -m proofs --long`` plotted and put in a table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from registry import Proof
from registry.long import is_long, read
from registry.static import StaticCatalogue
from reports.plots import drawn
from reports.text import table


def draw(ledger: Path, out: Path) -> list[Path]:
    """Write the plots of all long chains that are kept; the files. ``ValueError`` when none is."""
    found = plots(read(ledger))
    if not found:
        raise ValueError(f"no long chains in {ledger}: run python -m proofs --long")
    out.mkdir(parents=True, exist_ok=True)
    for name, svg in found.items():
        (out / name).write_text(svg, encoding="utf-8")
    return [out / name for name in found]


def plots(proofs: Iterable[Proof]) -> dict[str, str]:
    """SVG text by file name: one plot an operator and dtype, a line a variant and carry."""
    groups: dict[str, list[Proof]] = {}
    for proof in proofs:
        if is_long(proof):
            groups.setdefault(f"drift_{proof.operator}_{proof.dtype}.svg", []).append(proof)
    return {name: drawn(lambda axes, group=group: _lines(axes, group)) for name, group in sorted(groups.items())}  # type: ignore[misc]


def section(proofs: Iterable[Proof], catalogue: StaticCatalogue) -> str:
    """A table of the drift at the first, hundredth and last chunk; empty where nothing was run."""
    rows = []
    for proof in proofs:
        points = proof.details["drift"]
        chosen = [points[0], min(points, key=lambda p: abs(p["chunk"] - 100)), points[-1]]
        known = catalogue.variants.get(f"{proof.operator}/{proof.variant}")
        current = known is not None and catalogue.fingerprint(known, "carry") == proof.fingerprint
        for name in _carries(points):
            rows.append(
                [
                    f"{proof.operator}/{proof.variant}",
                    proof.dtype,
                    name,
                    *(f"{point[name]:.2e}" for point in chosen),
                    f"{points[-1]['chunk']:,}",
                    f"{proof.budget_used:.3g}",
                    "yes" if current else "no",
                ]
            )
    if not rows:
        return ""
    columns = ["Variant", "dtype", "Carry", "First", "About 100", "Last", "Chunks", "Budget used", "Sources as now"]
    intro = (
        "Relative error of the carry against a float64 chain (norm over norm) after that many chunks, each fed the "
        "carry of the one before, from `python -m proofs --long`; budget used is the most that any output or carry of "
        "any chunk used. Evidence beside the proofs: nothing requires it."
    )
    return f"## Long carries\n\n{intro}\n\n{table(columns, rows)}"


def _carries(points: Iterable[dict[str, float]]) -> list[str]:
    return sorted({name for point in points for name in point} - {"chunk"})


def _lines(axes: Any, group: Iterable[Proof]) -> bool:
    for proof in group:
        points = proof.details["drift"]
        for name in _carries(points):
            axes.loglog(
                [p["chunk"] for p in points], [max(p[name], 1e-20) for p in points], label=f"{proof.variant} {name}"
            )
    axes.set_xlabel("chunks")
    axes.set_ylabel("relative error of the carry against float64")
    axes.legend(fontsize=6)
    return True
