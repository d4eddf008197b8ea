"""The drift of a long carry against float64, drawn from the carry property's numbers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from registry import Proof


def plot(proofs: Iterable[Proof], folder: Path) -> list[Path]:
    """One SVG an operator and dtype, a line a variant and carry; the paths written.

    Raises ``ValueError`` when matplotlib is not installed.
    """
    series: dict[str, list[Proof]] = {}
    for proof in proofs:
        if proof.property == "carry" and proof.details.get("drift"):
            series.setdefault(f"{proof.operator}_{proof.dtype}", []).append(proof)
    if not series:
        return []
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install matplotlib") from error
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, group in sorted(series.items()):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        for proof in group:
            points = proof.details["drift"]
            chunks = [point["chunk"] for point in points]
            for carry in sorted(set(points[0]) - {"chunk"}):
                options = "".join(f" {k}={v}" for k, v in proof.options.items())
                axes.loglog(chunks, [max(p[carry], 1e-20) for p in points], label=f"{proof.variant}{options} {carry}")
        axes.set(xlabel="chunks", ylabel="relative error of the carry against float64", title=name.replace("_", " "))
        axes.legend(fontsize="small")
        path = folder / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        written.append(path)
    return written
