"""The merge gate: what fails it and what does not, its statistics, and a planted slow-down that is measured."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_reports_build import ENVIRONMENT, record, table_of

from benchmarks.__main__ import main as measure
from registry import Ledger, Proof, enumerate_static, load_recipe
from registry.ledger import ENGINE, RECIPE
from registry.records import document
from registry.settings import ROOT
from reports import compare, gate
from reports.__main__ import main
from reports.build import Places

PLUGIN = '''
import time

import torch

from registry import Case, Tolerance, operator, variant


@operator(
    name="pause", reference="long", cases=lambda: (Case(name="only", kind="real", sizes={"B": 2}),),
    draw=lambda case, generator, dtype: {"x": torch.randn(case.sizes["B"], generator=generator, dtype=dtype)},
    outputs=("y",), properties=("forward",), tolerance=Tolerance(k=8.0, c=32.0, reason="one rounding"),
)
def pause(arithmetic, x):
    """Twice x, after a while."""
    return arithmetic(x)


@variant(operator="pause", name="long")
def long(x):
    time.sleep(0.02)
    return 2 * x


@variant(operator="pause", name="short")
def short(x):
    time.sleep(SECONDS)
    return 2 * x
'''


def rows_of(ratios: list[float], null: list[float], **fields: Any) -> list[dict[str, Any]]:
    """A table whose variant and null row had these ratios in its rounds."""
    median = sorted(ratios)[len(ratios) // 2]
    rows = table_of(record(ratio=median, ratios=ratios, **fields))
    rows[1]["ratios"] = null
    return compare.with_null(rows)


def drawn(random_: random.Random, ratio: float, spread: float, rounds: int) -> list[dict[str, Any]]:
    """A measurement: log-normal noise on every round of every process, one round in ten disturbed by half."""

    def noise() -> float:
        return math.exp(random_.gauss(0, spread)) * (1.5 if random_.random() < 0.05 else 1.0)

    return rows_of(
        [ratio * noise() / noise() for _ in range(rounds)],
        [noise() / noise() for _ in range(rounds)],
    )


def judged(before: list[dict[str, Any]], now: list[dict[str, Any]], again: list[dict[str, Any]]) -> bool:
    """Whether the gate would fail, a second measurement included."""
    first = compare.worse(before, now)
    second = compare.worse(before, again, compare.AGREEING_SIGMAS)
    failing, _ = compare.confirmed(first, second, {compare.key(row) for row in again})
    return bool(failing)


def test_null_runs_raise_no_alarm() -> None:
    alarms = 0
    for seed in range(400):
        random_ = random.Random(seed)
        before, now, again = (drawn(random_, 20.0, 0.03, 5) for _ in range(3))
        alarms += judged(before, now, again)
    # Ten runs of a suite of ten rows are a hundred of these.
    assert alarms <= 1


def test_a_slow_down_by_a_quarter_is_caught() -> None:
    caught = 0
    for seed in range(200):
        random_ = random.Random(seed)
        before = drawn(random_, 20.0, 0.02, 5)
        now, again = (drawn(random_, 20.0 / 1.25, 0.02, 5) for _ in range(2))
        caught += judged(before, now, again)
    assert caught >= 190


def test_noise_of_the_null_row_widens_what_is_allowed() -> None:
    before, now = rows_of([20.0] * 5, [1.0] * 5), rows_of([15.0] * 5, [1.0] * 5)
    noisy = rows_of([15.0] * 5, [1.0, 1.4, 0.7, 1.3, 0.75])
    assert [e.kind for e in compare.worse(before, now)] == ["slower"]
    assert compare.worse(before, noisy) == []
    assert compare.worse(now, before) == []


def test_noise_between_recorded_runs_widens_what_is_allowed() -> None:
    fallen = rows_of([15.0] * 5, [1.0] * 5)
    row = rows_of([20.0] * 5, [1.0] * 5)[0]
    assert [e.kind for e in compare.worse([row], fallen)] == ["slower"]
    for ratio in (26.0, 15.5, 25.0, 16.0):
        row = compare.with_run(row, rows_of([ratio] * 5, [1.0] * 5)[0])
    assert row["runs"] == [20.0, 26.0, 15.5, 25.0, 16.0]
    assert row["ratio"] == 20.0
    assert compare.worse([row], fallen) == []
    quiet = compare.with_run(compare.with_run(rows_of([20.0] * 5, [1.0] * 5)[0], row), rows_of([20.5], [1.0])[0])
    assert [e.kind for e in compare.worse([quiet], fallen)] == ["slower"]


def test_a_run_is_added_to_the_recorded_ones_of_the_same_machine(built: Path) -> None:
    assert main(["baseline", *options(built)]) == 0
    path = built / "records" / "attention.cpu.standard.json"
    content = json.loads(path.read_text())
    content["records"][2] |= {"ratio": 30.0, "peak_bytes": 9 * 2**20}
    path.write_text(json.dumps(content))
    assert main(["baseline", *options(built), "--more"]) == 0
    (row,) = json.loads((built / "baseline.json").read_text())["records"]
    assert (row["runs"], row["ratio"], row["peak_bytes"]) == ([21.65, 30.0], pytest.approx(25.825), 9 * 2**20)
    content["environment"]["cores"] = 64
    path.write_text(json.dumps(content))
    before = (built / "baseline.json").read_text()
    assert main(["baseline", *options(built), "--more"]) == 2
    assert (built / "baseline.json").read_text() == before


def test_an_excess_fails_only_when_measured_twice() -> None:
    before, now = rows_of([20.0] * 5, [1.0] * 5), rows_of([15.0] * 5, [1.0] * 5)
    first = compare.worse(before, now)
    assert compare.confirmed(first, [], set()) == ([], first)
    assert compare.confirmed(first, [], {first[0].key}) == ([], [])
    assert compare.confirmed(first, first, {first[0].key}) == (first, [])


def test_hungrier_and_lost_rows_are_found() -> None:
    before = rows_of([20.0] * 5, [1.0] * 5, peak_bytes=100 * 2**20)
    assert compare.worse(before, rows_of([20.0] * 5, [1.0] * 5, peak_bytes=110 * 2**20)) == []
    grown = rows_of([20.0] * 5, [1.0] * 5, peak_bytes=130 * 2**20)
    assert [e.kind for e in compare.worse(before, grown)] == ["hungrier"]
    gone = {"status": "crashed", "reason": "exit code 1: no", "ratio": None, "median_s": None, "values_s": None}
    lost = compare.with_null(table_of(record(**{**gone, "ratios": None, "peak_bytes": None})))
    assert [(e.kind, "exit code 1: no" in e.message) for e in compare.worse(before, lost)] == [("lost", True)]


def question(tmp_path: Path, **fields: Any) -> gate.Question:
    places = Places(tmp_path / "records", tmp_path / "ledger", tmp_path / "generated", tmp_path / "README.md")
    base: dict[str, Any] = {"places": places, "recipes": ("production",), "device_classes": ("cpu",)}
    return gate.Question(**{**base, "baseline": tmp_path / "baseline.json", "measured": places.records, **fields})


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """Records of attention with their pages built."""
    (tmp_path / "records").mkdir()
    content = {**document(table_of(record())), "environment": ENVIRONMENT, "profile": "standard"}
    (tmp_path / "records" / "attention.cpu.standard.json").write_text(json.dumps(content))
    assert main(["build", *options(tmp_path)]) == 0
    return tmp_path


def options(tmp_path: Path) -> list[str]:
    names = {"records": "records", "out": "generated", "ledger": "ledger", "readme": "README.md"}
    found = [part for name, place in names.items() for part in (f"--{name}", str(tmp_path / place))]
    return [*found, "--baseline", str(tmp_path / "baseline.json")]


def differing(tmp_path: Path) -> list[str]:
    return [text for text in gate.tables(question(tmp_path)).failures if not text.startswith("no records")]


def test_tables_that_are_what_their_records_give_pass(built: Path) -> None:
    assert differing(built) == []
    missing = [text for text in gate.tables(question(built)).failures if text.startswith("no records")]
    assert len(missing) == 12


def test_a_typed_number_fails(built: Path) -> None:
    page = built / "generated" / "attention.md"
    page.write_text(page.read_text().replace("12.35", "11.35"))
    assert differing(built) == ["`attention.md` is not what its records give; `python -m reports build`"]


def test_changed_records_and_missing_pages_fail(built: Path) -> None:
    (built / "generated" / "PROOFS.md").unlink()
    path = built / "records" / "attention.cpu.standard.json"
    path.write_text(path.read_text().replace("0.01235", "0.01335"))
    found = " ".join(differing(built))
    assert "`PROOFS.md` is missing" in found
    assert "`attention.md` is not what its records give" in found
    assert "`SECTION4.md` is not what its records give" in found


def test_unproven_production_variants_fail_with_the_remedy(built: Path) -> None:
    failures = gate.proven(question(built)).failures
    assert any("`attention/chunked` of `production` on cpu: forward" in text for text in failures)
    assert any("python -m proofs --recipe production" in text for text in failures)


def test_proven_production_variants_pass_until_one_is_stale(tmp_path: Path) -> None:
    catalogue, recipe = enumerate_static(), load_recipe("production")
    passed = {"status": "passed", "dtype": "float32", "device_class": "cpu", "cases": 1, "checks": 1}
    numbers = {**passed, "worst_error": 0.0, "budget_used": 0.0}
    proofs = [
        Proof(
            operator=operator, variant=name, property=property_, options=each,
            fingerprint=catalogue.fingerprint(catalogue.variants[f"{operator}/{name}"], property_), **numbers,
        )
        for operator, name in recipe.variants.items()
        for property_ in catalogue.required(catalogue.variants[f"{operator}/{name}"], "float32")
        for each in catalogue.variants[f"{operator}/{name}"].option_sets()
    ]  # fmt: skip
    whole = catalogue.recipe_fingerprint(recipe.variants, recipe.options)
    own = Proof(operator=RECIPE, variant="production", property=ENGINE, fingerprint=whole, **numbers)
    Ledger(tmp_path / "ledger").write([*proofs, own])
    assert gate.proven(question(tmp_path)).failures == ()
    old = dataclasses.replace(proofs[0], fingerprint={**proofs[0].fingerprint, "torch": "1.0"})
    Ledger(tmp_path / "ledger").write([old])
    assert "is stale: torch 1.0 became" in gate.proven(question(tmp_path)).failures[0]


def test_a_surviving_adversary_fails(tmp_path: Path) -> None:
    assert gate.adversaries(question(tmp_path)).failures == (
        "no kill matrix in the ledger; prove the adversaries first",
    )
    (tmp_path / "ledger").mkdir()
    alive = {
        "adversary": "alive",
        "operator": "moe",
        "mechanism": 5,
        "what": "zeros",
        "right": False,
        "verdict": "passed",
        "killed_by": None,
        "kills": [],
    }
    (tmp_path / "ledger" / "kill_matrix.json").write_text(json.dumps(document([alive])))
    assert gate.adversaries(question(tmp_path)).failures == ("alive (moe: zeros) is wrong and passed",)


def test_another_machine_is_not_compared(built: Path) -> None:
    assert main(["baseline", *options(built)]) == 0
    path = built / "records" / "attention.cpu.standard.json"
    content = json.loads(path.read_text())
    content["environment"]["cores"] = 64
    content["records"][2] |= {"ratio": 1.0, "ratios": [1.0, 1.0]}
    path.write_text(json.dumps(content))
    check = gate.ratios(question(built))
    assert check.failures == ()
    assert "its baseline was not: not compared" in check.remarks[0]


def test_the_comment_goes_to_stdout_and_the_exit_code_says_the_verdict(
    built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["gate", *options(built), "--markdown", str(built / "comment.md")]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("## Merge gate: failed\n")
    assert (built / "comment.md").read_text() == printed
    assert gate.comment([gate.Check("one"), gate.Check("two", remarks=("noted",))]) == (
        "## Merge gate: passed\n\n- [x] one\n- [x] two\n  - _noted_\n"
    )


def test_bad_usage_of_the_gate_is_one_line(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for extra in (["--against", "no-such-revision"], ["--recipe", "productoin"]):
        capsys.readouterr()
        assert main(["gate", *options(built), *extra]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_reports_import_no_torch(built: Path) -> None:
    script = (
        "import sys; from reports.__main__ import main; code = main(sys.argv[1:]);"
        "bad = {'torch', 'fractus', 'proofs', 'benchmarks', 'trainer'} & set(sys.modules);"
        "assert not bad, bad; sys.exit(code)"
    )
    for verb, expected in (("build", 0), ("gate", 1)):
        command = [sys.executable, "-c", script, verb, *options(built)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (expected, "")


def run(folder: Path, seconds: float, name: str) -> Path:
    """Measure the plug-in whose variant pauses so long."""
    folder.mkdir(exist_ok=True)
    path = folder / "pauses.py"
    path.write_text(PLUGIN.replace("SECONDS", str(seconds)))
    command = ["--plugin", str(path), "--suite", "pause", "--quick", "--unproven", "--budget", "0.06", "--threads", "1"]
    assert measure([*command, "--rounds", "3", "--out", str(folder / name)]) == 0
    return folder / name


def test_a_planted_slow_down_is_caught_and_a_null_run_is_not(tmp_path: Path) -> None:
    recorded = run(tmp_path, 0.010, "recorded")
    (tmp_path / "null").mkdir()
    (tmp_path / "null" / "machine.cpu.json").write_bytes((recorded / "machine.cpu.json").read_bytes())
    assert main(["baseline", "--records", str(recorded), "--baseline", str(tmp_path / "baseline.json")]) == 0
    asked = question(tmp_path, measured=run(tmp_path, 0.010, "null"))
    assert gate.ratios(asked).failures == ()
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "machine.cpu.json").write_bytes((recorded / "machine.cpu.json").read_bytes())
    slow = dataclasses.replace(asked, measured=run(tmp_path, 0.0125, "slow"))
    assert ["measure again" in text for text in gate.ratios(slow).failures] == [True]
    calls: list[list[str]] = []

    def again(command: Any) -> int:
        calls.append(list(command))
        (tmp_path / "slow" / "again").mkdir()
        source = tmp_path / "slow" / "pause.cpu.quick.json"
        (tmp_path / "slow" / "again" / source.name).write_bytes(source.read_bytes())
        return 0

    confirmed = gate.ratios(dataclasses.replace(slow, remeasure=["--unproven"], run=again)).failures
    as_before = ["--suite", "pause", "--quick", "--device", "cpu", "--dtype", "float32", "--threads", "1"]
    assert [call[1:] for call in calls] == [
        ["-m", "benchmarks", *as_before, "--out", str(tmp_path / "slow" / "again"), "--unproven"]
    ]
    assert len(confirmed) == 1
    assert confirmed[0].endswith("(measured twice)")
