"""The drift of a long carry against float64: runs of ``python -m proofs --long``, kept, plotted and put in a table."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from registry import Proof
from registry.records import document
from registry.static import StaticCatalogue
from reports.plots import drawn
from reports.records import read_json
from reports.text import table

LONG = "long.json"
STANDARD_CHUNKS = 64


def require_plots() -> None:
    """``ValueError`` when matplotlib is missing: said before the hours of a long run, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the drift is plotted with matplotlib: pip install matplotlib")


def read(folder: Path) -> list[Proof]:
    """The long runs kept in a ledger's folder, if any; ``ValueError`` for a file of another form."""
    path = folder / LONG
    if not path.is_file():
        return []
    try:
        return [Proof.from_json(entry) for entry in read_json(path)[0]["records"]]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no long chains: {error}; run python -m proofs --long again") from error


def keep(proofs: Iterable[Proof], folder: Path) -> Path | None:
    """Add the long chains among ``proofs`` to those kept, each in the place of its forerunner."""
    found = [proof for proof in proofs if _is_long(proof)]
    if not found:
        return None
    kept = {proof.key: proof for proof in [*read(folder), *found]}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LONG
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document([kept[key].to_json() for key in sorted(kept)]), indent=1) + "\n")
    os.replace(temporary, path)
    return path


def plots(proofs: Iterable[Proof]) -> dict[str, str]:
    """SVG text by file name: one plot an operator and dtype, a line a variant and carry."""
    groups: dict[str, list[Proof]] = {}
    for proof in proofs:
        if _is_long(proof):
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


def _is_long(proof: Proof) -> bool:
    points = proof.details.get("drift") or [{"chunk": 0}]
    return proof.property == "carry" and proof.status == "passed" and bool(points[-1]["chunk"] > STANDARD_CHUNKS)


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
