"""``python -m reports build | gate | baseline | drift``: tables, plots, and what a merge has to pass."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from registry.settings import ROOT, settings
from reports import drift
from reports.build import Places, build
from reports.gate import Question, gate, record_baseline


def main(argv: Sequence[str] | None = None) -> int:
    """0 good, 1 a gate that fails, 2 bad usage or unreadable records with one line and nothing written."""
    given = parser().parse_args(argv)
    try:
        return int(given.command(given))
    except ValueError as error:
        print(f"reports: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """All verbs and options."""
    root = argparse.ArgumentParser(
        prog="python -m reports", description="Markdown and plots from records; the merge gate."
    )
    verbs = root.add_subparsers(required=True, metavar="build | gate | baseline | drift")
    building = verbs.add_parser("build", help="write reports/generated and README's table from the records")
    building.add_argument(
        "--metrics", type=Path, default=None, help="a run's metrics.jsonl for the loss curve and the position"
    )
    building.set_defaults(command=_build)
    gating = verbs.add_parser(
        "gate", help="check everything a merge needs; prints a markdown comment, exit 1 when it fails"
    )
    _gate_options(gating)
    gating.set_defaults(command=_gate)
    keeping = verbs.add_parser("baseline", help="make the ratios of the records the recorded ones")
    keeping.add_argument(
        "--more",
        action="store_true",
        help="add the records as one more run of what is recorded: from three runs on the gate knows the noise between",
    )
    keeping.set_defaults(command=_baseline)
    drawing = verbs.add_parser("drift", help="plot the long chains that python -m proofs --long kept, into --out")
    drawing.set_defaults(command=_drift)
    for verb in (building, gating, keeping, drawing):
        _place_options(verb)
    return root


def _gate_options(gating: argparse.ArgumentParser) -> None:
    add = gating.add_argument
    revision = "take the baseline from this git revision (default: the file as it is)"
    add("--against", default=None, metavar="REF", help=revision)
    add("--measured", type=Path, default=None, help="records to hold against the baseline (default: --records)")
    add("--proofs", type=Path, default=None, help="ledger of fresh proofs to judge by (default: --ledger)")
    add("--again", type=Path, default=None, help="a second measurement, for what the first one found worse")
    add(
        "--remeasure",
        nargs="?",
        const="",
        default=None,
        metavar="OPTIONS",
        help="measure an excess again now, as it was measured, with more options of python -m benchmarks if given: "
        "--remeasure '--ledger DIR'",
    )
    add("--recipe", action="append", default=[], help="recipes that have to be proven (default: production)")
    add("--device-class", action="append", default=[], help="where (default: cpu)")
    add("--markdown", type=Path, default=None, help="write the comment to this file as well")


def _place_options(verb: argparse.ArgumentParser) -> None:
    add, folder = verb.add_argument, ROOT / "reports"
    add("--records", type=Path, default=folder / "records", help="benchmark records (default: reports/records)")
    add("--out", type=Path, default=folder / "generated", help="generated files (default: reports/generated)")
    add("--ledger", type=Path, default=None, help="folder of proofs (default: the checkout's)")
    baseline = "the recorded ratios (default: reports/baseline.json)"
    add("--baseline", type=Path, default=folder / "baseline.json", help=baseline)
    add("--readme", type=Path, default=ROOT / "README.md", help="file with the headline table (default: README.md)")


def _places(given: argparse.Namespace) -> Places:
    ledger = given.ledger or settings().ledger
    return Places(given.records, ledger, given.out, given.readme, getattr(given, "metrics", None))


def _build(given: argparse.Namespace) -> int:
    files = build(_places(given))
    print(f"{len(files)} files in {given.out.relative_to(ROOT) if given.out.is_relative_to(ROOT) else given.out}")
    return 0


def _gate(given: argparse.Namespace) -> int:
    passed, text = gate(
        Question(
            places=_places(given),
            recipes=tuple(given.recipe) or ("production",),
            device_classes=tuple(given.device_class) or ("cpu",),
            baseline=given.baseline,
            measured=given.measured or given.records,
            proofs=given.proofs,
            again=given.again,
            against=given.against,
            remeasure=None if given.remeasure is None else shlex.split(given.remeasure),
        )
    )
    print(text, end="")
    if given.markdown is not None:
        given.markdown.write_text(text, encoding="utf-8")
    return 0 if passed else 1


def _baseline(given: argparse.Namespace) -> int:
    count = record_baseline(given.records, given.baseline, more=given.more)
    print(f"{count} ratios recorded in {given.baseline.name}")
    return 0


def _drift(given: argparse.Namespace) -> int:
    for path in drift.draw(given.ledger or settings().ledger, given.out):
        print(f"drift against float64: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
