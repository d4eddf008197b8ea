"""Quickstart: it tokenizes, asks for proofs, trains and reports; without proofs it trains nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trainer import metrics, quickstart
from trainer.__main__ import main


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "TEXT_BYTES", 900_000)
    monkeypatch.setitem(quickstart.SETTINGS, "steps", 3)


def test_the_text_is_the_same_every_time_and_within_its_limit() -> None:
    chosen = quickstart.standard_library(1_500_000)
    assert chosen == quickstart.standard_library(1_500_000)
    assert chosen[0].name == "topics.py"
    assert 1_000_000 < sum(path.stat().st_size for path in chosen) <= 1_500_000


def test_it_trains_on_proofs_and_says_what_it_did(
    tmp_path: Path, proven_ledger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "prove", lambda ledger: shutil.copytree(proven_ledger, ledger, dirs_exist_ok=True))
    for _ in range(2):
        assert main(["quickstart", "--out", str(tmp_path / "q")]) == 0
    assert [line["step"] for line in metrics.read(tmp_path / "q" / "run" / "metrics.jsonl")] == [1, 2, 3]
    output = capsys.readouterr().out
    for expected in ("3 steps", "ema_tf", "attention/chunked", "causality", "python -m registry why"):
        assert expected in output


def test_without_proofs_it_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart.sys, "executable", shutil.which("false"))
    assert main(["quickstart", "--out", str(tmp_path / "q")]) == 1
    assert "a proof failed, so nothing was trained" in capsys.readouterr().err
    assert not (tmp_path / "q" / "run").exists()
