"""Long carries: kept beside the ledger, newest a key, plotted and tabled from what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from registry import Proof, enumerate_static, long
from reports import drift


def proof(variant: str = "chunked", chunks: int = 10_000, last: float = 3e-6, **changed: Any) -> Proof:
    """A carry proof whose drift grows to ``last``."""
    points = [
        {"chunk": chunk, "S": last * chunk / chunks, "z": last * chunk / chunks / 2} for chunk in (1, 100, chunks)
    ]
    fields: dict[str, Any] = {
        "operator": "attention", "variant": variant, "property": "carry", "dtype": "float32", "device_class": "cpu",
        "status": "passed", "cases": 1, "checks": 3, "worst_error": 1e-6, "budget_used": 0.25,
        "details": {"drift": points},
    }  # fmt: skip
    return Proof(**{**fields, **changed})


def test_the_newest_run_of_a_variant_is_kept_beside_the_others(tmp_path: Path) -> None:
    assert long.keep([proof("looped"), proof(last=3e-6)], tmp_path) == tmp_path / "long.json"
    long.keep([proof(last=5e-6)], tmp_path)
    kept = {p.variant: p.details["drift"][-1]["S"] for p in long.read(tmp_path)}
    assert kept == {"chunked": 5e-6, "looped": 3e-6}


@pytest.mark.parametrize(
    "short",
    [
        proof(chunks=64),
        proof(details={}),
        proof(status="mismatch", message="S is off", worst_error=None, budget_used=None),
    ],
    ids=["the standard run", "no carry", "not passed"],
)
def test_only_long_chains_that_passed_are_kept(short: Proof, tmp_path: Path) -> None:
    assert long.keep([short], tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_the_table_and_the_plot_show_each_carry(tmp_path: Path) -> None:
    long.keep([proof()], tmp_path)
    kept = long.read(tmp_path)
    text = drift.section(kept, enumerate_static())
    assert "| attention/chunked | float32 | S | 3.00e-10 | 3.00e-08 | 3.00e-06 | 10,000 | 0.25 | no |" in text
    plots = drift.plots(kept)
    assert list(plots) == ["drift_attention_float32.svg"]
    assert "chunked S" in plots["drift_attention_float32.svg"]
    assert "chunked z" in plots["drift_attention_float32.svg"]


def test_sources_as_now_is_told_from_the_fingerprint(tmp_path: Path) -> None:
    catalogue = enumerate_static()
    current = catalogue.fingerprint(catalogue.variants["attention/chunked"], "carry")
    long.keep([proof(fingerprint=current)], tmp_path)
    assert drift.section(long.read(tmp_path), catalogue).rstrip().endswith("| yes |")


def test_nothing_run_nothing_shown(tmp_path: Path) -> None:
    assert drift.section(long.read(tmp_path), enumerate_static()) == ""
    assert drift.plots([]) == {}


def test_a_file_of_another_form_is_named(tmp_path: Path) -> None:
    (tmp_path / "long.json").write_text(json.dumps({"schema_version": 1, "records": [{"variant": "chunked"}]}))
    with pytest.raises(ValueError, match=r"long\.json"):
        long.read(tmp_path)
