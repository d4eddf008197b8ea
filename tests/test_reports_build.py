"""Generated files: numbers from records alone, the same bytes each time, notes by rule, bad records refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from registry import Proof
from registry.ledger import Ledger
from registry.records import document
from reports import derived, evidence, records, tables, text
from reports.__main__ import main
from reports.build import BEGIN, END

ENVIRONMENT = {"device": "a processor", "cores": 2, "threads": 2, "torch": "2.11", "memory_bytes": 2**34,
               "rates": {"matmul_float32_operations_per_s": 1e11, "copy_bytes_per_s": 1e10}}  # fmt: skip


def record(**fields: Any) -> dict[str, Any]:
    """A measured row of attention, with what is given changed."""
    base = {
        "suite": "attention", "operator": "attention", "variant": "chunked", "recipe": None, "case": "real_1b",
        "axes": {"B": 2, "G": 80, "C": 128, "K": 64}, "mode": "forward", "device": "cpu", "dtype": "float32",
        "status": "measured", "values_s": [0.0123, 0.0124], "median_s": 0.01235, "peak_bytes": 5 * 2**20,
        "floor_s": 0.004, "reason": "", "null": False, "proven": True, "options": {}, "ratio": 21.65,
        "ratios": [21.6, 21.7], "details": {},
    }  # fmt: skip
    return {**base, **fields}


def table_of(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    """A reference, its null row and the rows given."""
    reference = record(variant="einsum", median_s=0.2674, ratio=None, ratios=None, peak_bytes=2**30)
    null = {**reference, "null": True, "ratio": 1.02, "ratios": [1.01, 1.03]}
    return [reference, null, *rows]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write one suite's records; returns their folder."""

    def write_(rows: list[dict[str, Any]], suite: str = "attention", profile: str = "standard", **changed: Any) -> Path:
        folder = tmp_path / "records"
        folder.mkdir(exist_ok=True)
        content = {**document(rows), "environment": ENVIRONMENT, "profile": profile, **changed}
        (folder / f"{suite}.cpu.{profile}.json").write_text(json.dumps(content))
        return folder

    return write_


def build(tmp_path: Path, *options: str) -> int:
    places = {"records": "records", "out": "generated", "ledger": "ledger", "readme": "README.md"}
    return main(["build", *(part for k, v in places.items() for part in (f"--{k}", str(tmp_path / v))), *options])


def test_tables_say_what_the_records_say(write: Callable[..., Path], tmp_path: Path) -> None:
    folder = write(table_of(record()))
    assert build(tmp_path) == 0
    page = (tmp_path / "generated" / "attention.md").read_text()
    assert "| chunked | B=2, G=80, C=128, K=64 | 12.35 | ×21.6 | ×3.09 | 5.0 MiB |" in page
    assert "| einsum (null: against itself) |" in page
    assert page.rstrip().endswith(f"Records SHA-256 `{records.load(folder).sha256(['attention'])}`")
    assert "Not yet measured on CUDA" in (tmp_path / "generated" / "SECTION4.md").read_text()


def test_building_twice_gives_the_same_bytes(write: Callable[..., Path], tmp_path: Path) -> None:
    write(table_of(record()))
    build(tmp_path)
    first = {path.name: path.read_bytes() for path in (tmp_path / "generated").iterdir()}
    for path in (tmp_path / "generated").iterdir():
        path.unlink()
    build(tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "generated").iterdir()} == first
    assert {"SECTION4.md", "PROOFS.md", "attention.md", "speedup.svg", "memory.svg"} <= set(first)


def test_memory_is_drawn_by_suite(write: Callable[..., Path], tmp_path: Path) -> None:
    for suite in ("scaling", "engine_1b"):
        step = {"operator": "engine", "variant": "production", "case": "step", "mode": "step", "floor_s": None}
        write([record(suite=suite, axes={"B": B, "C": 128}, **step) for B in (1, 2)], suite=suite)
    build(tmp_path)
    drawn = (tmp_path / "generated" / "memory.svg").read_text()
    assert "scaling: production step cpu" in drawn
    assert "engine_1b: production step cpu" in drawn
    sped = (tmp_path / "generated" / "speedup.svg").read_text()
    assert all(f"{suite}: production step cpu B={B}" in sped for suite in ("scaling", "engine_1b") for B in (1, 2))


def test_pages_without_records_are_removed(write: Callable[..., Path], tmp_path: Path) -> None:
    folder = write(table_of(record()))
    write([record(suite="moe", operator="moe", variant="dense")], suite="moe")
    build(tmp_path)
    (folder / "moe.cpu.standard.json").unlink()
    build(tmp_path)
    assert not (tmp_path / "generated" / "moe.md").exists()
    assert (tmp_path / "generated" / "attention.md").exists()


def test_notes_follow_the_rules(write: Callable[..., Path], tmp_path: Path) -> None:
    killed = {"values_s": None, "median_s": None, "peak_bytes": None, "ratio": None, "ratios": None}
    slow = record(variant="cumsum", ratio=0.83, ratios=[0.83, 0.83])
    big = record(variant="looped", status="killed_memory", reason="2.10 GiB resident, limit 2.00 GiB", **killed)
    close = record(variant="near", median_s=0.006, ratio=40.0)
    hungry = record(variant="wide", ratio=1.5, peak_bytes=2**31)
    write(table_of(slow, big, close, hungry))
    build(tmp_path)
    page = (tmp_path / "generated" / "attention.md").read_text()
    slower = (
        "`cumsum` at B=2, G=80, C=128, K=64, forward, is slower than its reference here: ×0.83, with 0 % of its peak"
    )
    assert slower in page
    fastest = (
        "Fastest at B=2, G=80, C=128, K=64, forward: `near`, ×40 the speed of `einsum`, with 0 % of its peak memory."
    )
    assert fastest in page
    assert page.count("Fastest") == 1
    assert "`wide` at B=2, G=80, C=128, K=64, forward, needs 200 % of its reference's peak memory." in page
    assert "did not fit: 2.10 GiB resident, limit 2.00 GiB." in page
    assert "killed: memory" in page
    assert "takes ×1.5 of the least time" in page
    assert "differs by up to 2 % in the median of rounds, 3 % in a single round" in page
    assert "`looped` at B=2, G=80, C=128, K=64, forward, is slower" not in page


def test_the_last_measurement_is_shown_and_a_quick_one_only_alone(write: Callable[..., Path]) -> None:
    def shown(folder: Path) -> list[str]:
        return [d.profile for d in records.load(folder).documents]

    assert shown(write(table_of(record()), profile="quick", measured_at="2026-03-01T00:00:00+00:00")) == ["quick"]
    assert shown(write(table_of(record()), profile="full", measured_at="2026-01-01T00:00:00+00:00")) == ["full"]
    folder = write(table_of(record()), profile="standard", measured_at="2026-02-01T00:00:00+00:00")
    assert shown(folder) == ["standard"]
    assert len(records.load_all(folder)) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "is not a record file"),
        (json.dumps({**document([]), "profile": "standard", "schema_version": 0}), "schema version 0"),
        (json.dumps({**document([{"suite": "attention"}]), "profile": "standard"}), "record 0: no axes"),
        (json.dumps({**document([]), "profile": "enormous"}), "profile 'enormous'"),
    ],
)
def test_bad_records_are_one_line_and_reports_stay(
    content: str, message: str, write: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(table_of(record()))
    build(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "generated").iterdir()}
    (folder / "moe.cpu.standard.json").write_text(content)
    capsys.readouterr()
    assert build(tmp_path) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert {path: path.read_bytes() for path in (tmp_path / "generated").iterdir()} == before


def test_no_records_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(tmp_path) == 2
    assert "python -m benchmarks" in capsys.readouterr().err


def test_readme_table_is_rewritten_between_its_markers(write: Callable[..., Path], tmp_path: Path) -> None:
    write(table_of(record()))
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    build(tmp_path)
    lines = readme.read_text()
    assert lines.startswith(f"before\n{BEGIN}\n| Suite |")
    assert lines.endswith(f"{END}\nafter\n")
    assert "| attention | chunked | B=2, forward, cpu | 12.35 | ×21.6 | ±2 % | 5.0 MiB |" in lines
    readme.write_text("no markers\n")
    build(tmp_path)
    assert readme.read_text() == "no markers\n"


def test_time_to_finish_is_what_remains_over_the_rate(write: Callable[..., Path]) -> None:
    axes = {"P": 1, "B": 8, "T": 128, "L": 1_000_000}
    write([record(suite="data_fetch", operator="data_fetch", axes=axes)], suite="data_fetch")
    step = {"operator": "engine", "variant": "production", "axes": {"B": 1, "C": 100}, "mode": "step"}
    folder = write([record(suite="engine_1b", median_s=0.1, **step)], suite="engine_1b")
    finish = derived.time_to_finish(records.load(folder), position=280_000)
    assert "| engine_1b production, B=1, cpu | 1,000 | 1,000,000 | 280,000 | 0.2 h |" in finish
    assert "| 10M | 2.78 h | Proof of concept |" in derived.time_to_train(records.load(folder))


def test_breakdown_adds_up_and_leaves_the_rest(write: Callable[..., Path]) -> None:
    parts = [
        ("step", "forward", 0.1),
        ("step", "backward", 0.2),
        ("step", "clip", 0.01),
        ("step", "optimizer_step", 0.1),
    ]
    parts += [("forward", "attention", 0.04), ("forward", "moe", 0.03)]
    rows = [
        record(suite="breakdown", case=case, operator=name, median_s=s, recipe="production") for case, name, s in parts
    ]
    page = tables.breakdown(rows)
    assert "| Forward | 100 | 25 % |" in page
    assert "| **Total an iteration** | 400 | 100 % |" in page
    assert "| everything else (forward less the above) | 30 | 30 % |" in page


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: text.size(1536), "1.5 KiB"),
        (lambda: text.size(None), "—"),
        (lambda: text.ms(0.2674), "267.4"),
        (lambda: text.times(0.9), "×0.9"),
        (lambda: text.duration(3 * 86400), "3 days"),
        (lambda: text.table(["a"], [["x|y"]]), "| a |\n| --- |\n| x\\|y |"),
    ],
)
def test_numbers_are_written_with_units(call: Callable[[], str], expected: str) -> None:
    assert call() == expected


def proof(**fields: Any) -> Proof:
    base = {"operator": "attention", "variant": "looped", "property": "forward", "dtype": "float32",
            "device_class": "cpu", "status": "passed", "cases": 1, "checks": 7, "redrawn": 2, "worst_error": 1e-6,
            "budget_used": 0.25}  # fmt: skip
    return Proof(**{**base, **fields})


def test_proofs_page_shows_the_worst_budget_and_what_is_missing(write: Callable[..., Path], tmp_path: Path) -> None:
    write(table_of(record()))
    Ledger(tmp_path / "ledger").write([proof(), proof(property="gradient", budget_used=0.5, worst_error=3e-5)])
    build(tmp_path)
    page = (tmp_path / "generated" / "PROOFS.md").read_text()
    assert "| looped | cpu float32 | 2 of 10 | 0.25 | 0.5 | 3e-05 | 4 | 14 |" in page
    assert "| einsum | cpu float32 | 0 of 10 |" in page
    assert (tmp_path / "generated" / "budget.svg").is_file()


def test_loss_curve_comes_from_a_runs_metrics(write: Callable[..., Path], tmp_path: Path) -> None:
    write(table_of(record()))
    lines = [{"step": n, "token": 8 * n, "ema_tf": 5.0 / n, "ema_ss": None} for n in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert derived.position(tmp_path / "metrics.jsonl") == 64
    assert build(tmp_path, "--metrics", str(tmp_path / "metrics.jsonl")) == 0
    assert "run ema_tf" in (tmp_path / "generated" / "loss.svg").read_text()


def test_a_run_kept_by_name_has_a_curve_but_no_position(write: Callable[..., Path], tmp_path: Path) -> None:
    fetch = record(suite="data_fetch", operator="data_fetch", axes={"B": 8, "T": 128, "L": 1000, "P": 1})
    write([fetch], "data_fetch")
    folder = write([record(suite="engine", operator="engine", axes={"B": 1, "C": 128})], "engine")
    (folder / "quickstart.metrics.jsonl").write_text(json.dumps({"step": 1, "token": 8, "ema_tf": 5.0, "ema_ss": 6.0}))
    assert build(tmp_path) == 0
    curve = (tmp_path / "generated" / "loss.svg").read_text()
    assert "quickstart ema_tf" in curve
    assert "quickstart ema_ss" in curve
    assert "| 1,000 | 0 |" in (tmp_path / "generated" / "SECTION4.md").read_text()


DTYPES_MS = (("float32", 7.2), ("float64", 5.4))


def kill(**fields: Any) -> dict[str, Any]:
    base = {"adversary": "zeros", "operator": "attention", "mechanism": 5, "right": False,
            "verdict": "killed",
            "what": "zeros", "expected": "killed", "killed_by": "forward", "status": "failed",
            "duration_ms": 5}  # fmt: skip
    by = fields.get("killed_by", "forward")
    kills = [{"property": by, "dtype": d, "status": "failed", "duration_ms": ms} for d, ms in DTYPES_MS if by]
    return {**base, "kills": kills, **fields}


def test_survivors_are_wrong_ones_that_passed_and_right_ones_that_did_not() -> None:
    alive = kill(adversary="alive", verdict="passed", killed_by=None)
    right = kill(adversary="honest", right=True, verdict="passed", killed_by=None)
    wronged = kill(adversary="wronged", right=True)
    found = evidence.survivors([kill(), alive, right, wronged])
    assert [words.split()[0] for words in found] == ["alive", "wronged"]


def test_kill_matrix_is_a_table_of_adversary_by_property(write: Callable[..., Path], tmp_path: Path) -> None:
    write(table_of(record()))
    (tmp_path / "ledger").mkdir()
    rows = [
        kill(),
        kill(adversary="late", killed_by="causality"),
        kill(adversary="sum", right=True, verdict="passed", killed_by=None),
    ]
    (tmp_path / "ledger" / evidence.KILL_MATRIX).write_text(json.dumps(document(rows)))
    build(tmp_path)
    page = (tmp_path / "generated" / "KILL_MATRIX.md").read_text()
    assert "| Adversary | Operator | Mechanism | Is | causality | forward | Verdict | What it does |" in page
    assert "| late | attention | 5 | wrong | 5 |  | killed | zeros |" in page
    assert "2 wrong variants and 1 right ones; 0 judged wrongly." in page
    rows[0]["kills"] = {"forward float32": "failed"}
    (tmp_path / "ledger" / evidence.KILL_MATRIX).write_text(json.dumps(document(rows)))
    assert build(tmp_path) == 2
    assert (tmp_path / "generated" / "KILL_MATRIX.md").read_text() == page
