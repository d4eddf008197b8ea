"""From records and ledger to the generated files: rendered in memory first, so that the gate can compare."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from registry import Ledger, enumerate_static, long
from reports import derived, drift, evidence, section4
from reports.notes import null_noise
from reports.records import SUITES, Records, load
from reports.text import DASH, ms, size, table, times

BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Places:
    """Where records, ledger and generated files lie, and a run's metrics if there are any."""

    records: Path
    ledger: Path
    out: Path
    readme: Path
    metrics: Path | None = None

    @property
    def run_metrics(self) -> Path:
        """The metrics given, else those beside the records."""
        return self.metrics or self.records / METRICS

    @property
    def losses(self) -> dict[str, Path]:
        """Metrics whose loss curves are drawn, by name: that run's, and ``NAME.metrics.jsonl`` beside the records.

        A run kept by name (quickstart's, say) is not at a position of the shard that time to finish speaks of.
        """
        named = {path.name.removesuffix(f".{METRICS}"): path for path in sorted(self.records.glob(f"*.{METRICS}"))}
        return {**({"run": self.run_metrics} if self.run_metrics.is_file() else {}), **named}


def render(places: Places) -> dict[str, str]:
    """Every generated markdown file's text by name, a pure function of records, ledger and sources."""
    records = load(places.records)
    ledger, catalogue = Ledger(places.ledger), enumerate_static()
    pages = {f"{name}.md": section4.suite_page(records, name) for name in SUITES}
    pages["SECTION4.md"] = section4.section4(records, derived.position(places.run_metrics))
    pages["PROOFS.md"] = evidence.proofs_page(ledger, catalogue)
    pages["KILL_MATRIX.md"] = evidence.kill_page(places.ledger)
    return {name: text for name, text in pages.items() if text}


def build(places: Places) -> list[Path]:
    """Write everything that changed, plots included, and README's table; returns the files there are now."""
    from reports.plots import plots

    pages = render(places)
    drawn = plots(load(places.records), Ledger(places.ledger), enumerate_static(), places.losses)
    drawn |= drift.plots(long.read(places.ledger))
    readme = readme_text(places)
    places.out.mkdir(parents=True, exist_ok=True)
    for name, text in {**pages, **drawn}.items():
        write(places.out / name, text)
    for path in places.out.iterdir():
        if path.suffix in (".md", ".svg") and path.name not in pages and path.name not in drawn:
            path.unlink()
    if readme is not None:
        write(places.readme, readme)
    return sorted(places.out / name for name in {**pages, **drawn})


def readme_text(places: Places) -> str | None:
    """README with its table rewritten from the records; None where it has no markers for one."""
    if not places.readme.is_file():
        return None
    text = places.readme.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        return None
    return f"{head}{BEGIN}\n{headline(load(places.records))}\n{END}{tail}"


def headline(records: Records) -> str:
    """The fastest variant of every operator and the recipes end to end, against their references."""
    rows = []
    for suite in (
        "attention",
        "cross_entropy",
        "moe",
        "sampler",
        "data_fetch",
        "block",
        "optimizer_step",
        "engine",
        "engine_1b",
        "trainer",
    ):
        found = [r for r in records.of(suite) if r["status"] == "measured"]
        noise = null_noise(found)
        best = max((r for r in found if r.get("ratio") and not r.get("null")), key=lambda r: r["ratio"], default=None)
        if best is None:
            continue
        where = ", ".join(f"{k}={v}" for k, v in best["axes"].items() if k in ("B", "P", "N", "rows"))
        mode = best["mode"].replace("_", " + ")
        spread = f"±{100 * noise:.0f} %" if any(r.get("null") for r in found) else DASH
        rows.append(
            [
                suite,
                best["variant"],
                f"{where}, {mode}, {best['device']}",
                ms(best["median_s"]),
                times(best["ratio"]),
                spread,
                size(best["peak_bytes"]),
            ]
        )
    columns = ["Suite", "Best", "Where", "ms", "× reference", "Noise", "Peak"]
    return table(columns, rows) + f"\n\nGenerated from records with SHA-256 `{records.sha256()[:16]}`."


def write(path: Path, text: str) -> None:
    """Atomically; a file that already says this is left alone."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
