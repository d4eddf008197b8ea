"""A plug-in operator measured end to end: honest variants get a ratio, cheats and failures a row that says why not."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main

# Work is made of sleeps, which a busy machine stretches less than arithmetic.
PLUGIN = '''
import hashlib
import time

import torch

from registry import Case, Tolerance, operator, variant


def cases():
    return (Case(name="only", kind="real", sizes={"B": 2, "N": 64}),)


def draw(case, generator, dtype):
    return {"x": torch.randn(case.sizes["B"], case.sizes["N"], generator=generator, dtype=dtype)}


@operator(
    name="toy", reference="slow", cases=cases, draw=draw, outputs=("y",), properties=("forward",),
    tolerance=Tolerance(k=8.0, c=32.0, reason="one rounding"),
)
def toy(arithmetic, x):
    """Twice x."""
    return arithmetic(x)


@variant(operator="toy", name="slow")
def slow(x):
    time.sleep(0.006)
    return 2 * x


@variant(operator="toy", name="honest")
def honest(x):
    time.sleep({honest_s})
    return x + x


STATE = {"calls": 0, "kept": None, "memo": {}}


@variant(operator="toy", name="sleeper")
def sleeper(x):
    STATE["calls"] += 1
    time.sleep(0.05 if STATE["calls"] < 9 else 0.002)
    return 2 * x


@variant(operator="toy", name="cached")
def cached(x):
    if STATE["kept"] is None:
        STATE["kept"] = 2 * x
    return STATE["kept"]


@variant(operator="toy", name="forgetful")
def forgetful(x):
    STATE["calls"] += 1
    return 2 * x if STATE["calls"] < 10 else torch.zeros_like(x)


@variant(operator="toy", name="remembering")
def remembering(x):
    key = hashlib.sha256(x.numpy().tobytes()).hexdigest()
    if key not in STATE["memo"]:
        time.sleep(0.006)
        STATE["memo"][key] = 2 * x
    return STATE["memo"][key].clone()


@variant(operator="toy", name="hungry")
def hungry(x):
    held = [torch.ones(2**24) for _ in range(40)]
    return 2 * x + 0 * sum(float(each[0]) for each in held)


@variant(operator="toy", name="broken")
def broken(x):
    raise ArithmeticError("cannot do this")


@variant(operator="toy", name="quitting")
def quitting(x):
    import os
    os._exit(3)


@variant(operator="toy", name="clockmaker")
def clockmaker(x):
    from benchmarks import timing
    true = STATE.setdefault("clock", timing.cpu_clock)


    def cpu_clock():
        return true() / 10

    cpu_clock.__module__ = timing.__name__
    timing.cpu_clock = cpu_clock
    time.sleep(0.006)
    return 2 * x


@variant(operator="toy", name="misshapen")
def misshapen(x):
    return 2 * x[:1]
'''
FIELDS = {
    "suite", "operator", "variant", "recipe", "case", "axes", "mode", "device", "dtype", "status", "values_s",
    "median_s", "peak_bytes", "floor_s",
}  # fmt: skip


def plugin(folder: Path, honest_s: float = 0.002) -> Path:
    """The plug-in file with its honest variant taking so long."""
    path = folder / "toys.py"
    path.write_text(PLUGIN.replace("{honest_s}", str(honest_s)))
    return path


def measure(folder: Path, *options: str) -> list[dict[str, Any]]:
    """The toy suite's records under the quick profile."""
    out = folder / "records"  # one folder, so that the machine's rates are measured once
    common = ["--suite", "toy", "--quick", "--budget", "0.1", "--threads", "1", "--out", str(out)]
    assert main([*common, *options]) == 0
    document = json.loads((out / "toy.cpu.quick.json").read_text())
    assert document["schema_version"] == 1
    assert datetime.fromisoformat(document["measured_at"]).tzinfo is not None
    assert document["environment"]["rates"]["copy_bytes_per_s"] > 0
    records: list[dict[str, Any]] = document["records"]
    return records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, dict[str, Any]]:
    """Every variant's row, unproven ones let through, under a limit that ``hungry`` passes."""
    options = ["--plugin", str(plugin(folder)), "--unproven", "--rounds", "2", "--memory-limit", "1.2GiB"]
    records = measure(folder, *options)
    assert [r["null"] for r in records[:2]] == [False, True]
    assert records[1]["variant"] == records[0]["variant"] == "slow"
    return {"null" if r["null"] else r["variant"]: r for r in records}


def test_honest_variants_are_measured_and_marked_unproven(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["honest"]["status"] == "measured"
    assert rows["honest"]["ratio"] > 1.5
    assert rows["honest"]["checked"] is True
    assert rows["honest"]["proven"] is False
    assert rows["honest"]["threads"] == 1
    assert 0.5 < rows["null"]["ratio"] < 2.0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sleeper", "slow start"),
        ("cached", "wrong output"),
        ("forgetful", "wrong output"),
        ("misshapen", "wrong output"),
        ("clockmaker", "timer"),
    ],
)
def test_cheats_get_no_ratio(rows: dict[str, dict[str, Any]], name: str, reason: str) -> None:
    assert rows[name]["status"] == "refused"
    assert reason in rows[name]["reason"]
    assert rows[name]["ratio"] is None
    assert rows[name]["median_s"] is None


def test_answers_kept_by_content_gain_nothing(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["remembering"]["ratio"] < 1.3


def test_failures_are_rows_with_their_reason(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["hungry"]["status"] == "killed_memory"
    assert "limit 1.20 GiB" in rows["hungry"]["reason"]
    assert (rows["broken"]["status"], rows["quitting"]["status"]) == ("crashed", "crashed")
    assert "cannot do this" in rows["broken"]["reason"]
    assert "exit code 3" in rows["quitting"]["reason"]


def test_records_have_the_fields_and_null_for_what_was_not_measured(rows: dict[str, dict[str, Any]]) -> None:
    for record in rows.values():
        assert set(record) >= FIELDS
        if record["status"] != "measured":
            assert record["values_s"] is record["median_s"] is record["peak_bytes"] is None
    assert len(rows["honest"]["rounds"]) == len(rows["honest"]["ratios"]) == 2


def test_unproven_variants_are_refused(folder: Path) -> None:
    records = measure(folder, "--plugin", str(plugin(folder)))
    assert {record["status"] for record in records} == {"refused"}
    assert all(record["reason"].startswith("unproven: toy/") for record in records)
