"""The merge gate: evidence current, tables what their records give, nothing slower or hungrier, no adversary alive."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry import Ledger, enumerate_static, load_recipe
from registry.records import document
from registry.settings import ROOT
from reports import compare, evidence
from reports.build import Places, readme_text, render, write
from reports.records import SUITES, Document, load, load_all, read_json

COMPARABLE = ("device", "cores", "threads")


def measure_again(command: Sequence[str]) -> int:
    """Run the benchmarks as a command of their own; the gate's stdout stays the comment alone."""
    return subprocess.run(list(command), check=False, stdout=subprocess.DEVNULL).returncode


@dataclass(frozen=True)
class Check:
    """One condition: its name, what is against it, and what is worth knowing though it does not fail."""

    name: str
    failures: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """What the gate is asked: places, recipes, the fresh measurement and the baseline it is held against."""

    places: Places
    recipes: tuple[str, ...]
    device_classes: tuple[str, ...]
    baseline: Path
    measured: Path
    proofs: Path | None = None
    again: Path | None = None
    against: str | None = None
    remeasure: Sequence[str] | None = None
    dtype: str = "float32"
    run: Callable[[Sequence[str]], int] = field(default=measure_again)


def gate(question: Question) -> tuple[bool, str]:
    """Whether everything holds, and the markdown comment that says so."""
    checks = [proven(question), tables(question), adversaries(question), ratios(question)]
    return not any(check.failures for check in checks), comment(checks)


def proven(question: Question) -> Check:
    """Every variant of the recipes, and the recipes themselves, proven as the sources stand now."""
    catalogue, ledger = enumerate_static(), Ledger(question.proofs or question.places.ledger)
    failures = []
    for name in question.recipes:
        recipe = load_recipe(name, catalogue)
        for device in question.device_classes:
            for operator, variant in recipe.variants.items():
                gaps = ledger.gaps(catalogue.variants[f"{operator}/{variant}"], device, question.dtype, catalogue)
                if gaps:
                    more = f" and {len(gaps) - 1} more" if len(gaps) > 1 else ""
                    remedy = f"`python -m proofs --operator {operator} --variant {variant}`"
                    failures.append(f"`{operator}/{variant}` of `{name}` on {device}: {gaps[0]}{more}; {remedy}")
            gap = ledger.recipe_gap(recipe, question.dtype, device, catalogue)
            if gap is not None:
                failures.append(f"recipe `{name}` on {device}: {gap}; `python -m proofs --recipe {name}`")
    return Check("Production variants proven", tuple(failures))


def tables(question: Question) -> Check:
    """Every suite has records, every generated file is what the records give, README's table too."""
    places = question.places
    missing = [
        f"no records of suite `{name}`; `python -m benchmarks --suite {name}`"
        for name in SUITES
        if not load(places.records).of(name)
    ]
    wanted = {places.out / name: text for name, text in render(places).items()}
    readme = readme_text(places)
    if readme is not None:
        wanted[places.readme] = readme
    differing = []
    for path, text in sorted(wanted.items()):
        if not path.is_file():
            differing.append(f"`{path.name}` is missing; `python -m reports build`")
        elif path.read_text(encoding="utf-8") != text:
            differing.append(f"`{path.name}` is not what its records give; `python -m reports build`")
    known = {path.name for path in wanted}
    extra = [f"`{p.name}` has no records behind it" for p in sorted(places.out.glob("*.md")) if p.name not in known]
    return Check("Tables filled and true to their records", (*missing, *differing, *extra))


def adversaries(question: Question) -> Check:
    """No wrong variant passed, no right one was rejected; by the fresh proofs' matrix where they have one."""
    records = evidence.kill_records(question.proofs) if question.proofs is not None else None
    records = evidence.kill_records(question.places.ledger) if records is None else records
    if records is None:
        return Check("Adversaries killed", ("no kill matrix in the ledger; prove the adversaries first",))
    return Check("Adversaries killed", tuple(evidence.survivors(records)))


def ratios(question: Question) -> Check:
    """No ratio or peak worse than recorded by more than the noise, unless a second measurement disagrees."""
    name = "Nothing slower or hungrier than recorded"
    baseline = recorded(question)
    if baseline is None:
        where = f"at {question.against}" if question.against else f"in {question.baseline.name}"
        return Check(name, remarks=(f"no baseline {where}: ratios were not compared",))
    now, remarks = _comparable(load_all(question.measured), baseline["environment"])
    before = list(baseline["records"])
    first = compare.worse(before, now)
    again = question.again
    if first and again is None and question.remeasure is not None:
        again = question.measured / "again"
        for options in _as_before(question.measured, {excess.key for excess in first}):
            question.run([sys.executable, "-m", "benchmarks", *options, "--out", str(again), *question.remeasure])
    second = _comparable(load_all(again), baseline["environment"])[0] if again is not None and again.is_dir() else []
    failing, open_ = compare.confirmed(
        first, compare.worse(before, second, compare.AGREEING_SIGMAS), {compare.key(row) for row in second}
    )
    failures = [f"{excess.message} (measured twice)" for excess in failing]
    how = "measure again: `python -m benchmarks --suite {} --out AGAIN`, then `python -m reports gate --again AGAIN`"
    failures += [f"{excess.message}; {how.format(excess.suite)}" for excess in open_]
    gone = [e.message for e in first if e not in failing and e not in open_]
    remarks += [f"not confirmed by a second measurement: {message}" for message in gone]
    return Check(name, tuple(failures), tuple(remarks))


def _as_before(measured: Path, keys: set[compare.Key]) -> list[list[str]]:
    """Options of ``python -m benchmarks`` for every record file that holds one of these rows, as it was measured."""
    found = []
    for document_ in load_all(measured):
        row = next((record for record in document_.records if compare.key(record) in keys), None)
        if row is not None:
            profile = [] if document_.profile == "standard" else [f"--{document_.profile}"]
            place = ["--device", row["device"].partition(":")[0], "--dtype", row["dtype"]]
            known = document_.environment.get("threads")
            threads = [] if known is None else ["--threads", str(known)]
            found.append(["--suite", document_.place[0], *profile, *place, *threads])
    return found


def _comparable(documents: Sequence[Document], environments: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows measured on a machine like the baseline's; a remark for the rest, whose ratios mean something else."""
    rows: list[dict[str, Any]] = []
    remarks = []
    for found in documents:
        place = f"{found.place[0]}.{found.place[1]}.{found.profile}"
        own = {name: found.environment.get(name) for name in COMPARABLE}
        if environments.get(place, own) != own:
            machine = f"{own['device']} with {own['threads']} threads"
            remarks.append(f"{place} was measured on {machine}, its baseline was not: not compared")
            continue
        rows += compare.with_null(found.records)
    return rows, remarks


def recorded(question: Question) -> dict[str, Any] | None:
    """The committed baseline, as it stands or at a git revision; None where there is none."""
    if question.against is None:
        return read_json(question.baseline)[0] if question.baseline.is_file() else None
    git = ["git", "-C", str(ROOT)]
    known = subprocess.run(
        [*git, "rev-parse", "--verify", "--quiet", f"{question.against}^{{commit}}"], capture_output=True, check=False
    )
    if known.returncode:
        raise ValueError(f"no git revision {question.against!r} here for --against")
    path = (
        question.baseline.resolve().relative_to(ROOT)
        if question.baseline.resolve().is_relative_to(ROOT)
        else question.baseline
    )
    shown = subprocess.run(
        [*git, "show", f"{question.against}:{path.as_posix()}"], capture_output=True, text=True, check=False
    )
    content: dict[str, Any] | None = json.loads(shown.stdout) if shown.returncode == 0 else None
    return content


def record_baseline(measured: Path, baseline: Path, *, more: bool = False) -> int:
    """Make the ratios of these records the recorded ones, other rows kept; returns the number of rows.

    ``more`` adds them to the runs recorded already, so that the noise between runs is known as well; ``ValueError``
    when they are of another machine than these.
    """
    rows: dict[str, dict[str, Any]] = {}
    environments: dict[str, Any] = {}
    if baseline.is_file():
        content = read_json(baseline)[0]
        rows, environments = {compare.key(row): row for row in content["records"]}, dict(content["environment"])
    for found in load_all(measured):
        place = f"{found.place[0]}.{found.place[1]}.{found.profile}"
        own = {name: found.environment.get(name) for name in COMPARABLE}
        if more and environments.get(place, own) != own:
            raise ValueError(f"{place} was recorded on another machine: record it here without --more first")
        environments[place] = own
        for row in compare.with_null(found.records):
            name = compare.key(row)
            if row["ratio"]:
                rows[name] = compare.with_run(rows[name], row) if more and name in rows else row
    content = {**document([rows[name] for name in sorted(rows)]), "environment": environments}
    write(baseline, json.dumps(content, indent=1, sort_keys=True) + "\n")
    return len(rows)


def comment(checks: Sequence[Check]) -> str:
    """The checks as a pull request's comment."""
    verdict = "failed" if any(check.failures for check in checks) else "passed"
    lines = [f"## Merge gate: {verdict}", ""]
    for check in checks:
        lines.append(f"- [{' ' if check.failures else 'x'}] {check.name}")
        lines += [f"  - {text}" for text in (*check.failures, *(f"_{remark}_" for remark in check.remarks))]
    return "\n".join(lines) + "\n"
