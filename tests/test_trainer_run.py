"""A run: one line a step, whole checkpoints, and a resume that is bitwise the run that was never stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, SIZES
from filelock import FileLock

from trainer import checkpoint, metrics
from trainer.__main__ import main

MEASURED = ("tokens_per_s", "peak_bytes")


def losses(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run without what is measured anew each time."""
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in metrics.read(out / "metrics.jsonl")]


def load(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=True))


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Equal to the bit, tensors and numbers alike."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected), where
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}.{key}")
    else:
        assert actual == expected, where


def test_metrics_have_a_line_a_step_with_every_field(arguments: list[str], tmp_path: Path) -> None:
    assert main([*arguments, "--out", str(tmp_path / "a"), "--steps", "5"]) == 0
    lines = metrics.read(tmp_path / "a" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["token"] for line in lines] == [16, 32, 48, 64, 80]
    assert all(tuple(line) == metrics.FIELDS for line in lines)
    assert {line["ss"] is None for line in lines} == {True, False}
    assert lines[0]["ema_tf"] == lines[0]["tf"]
    assert lines[1]["ema_tf"] == pytest.approx(0.98 * lines[0]["tf"] + 0.02 * lines[1]["tf"])
    assert all(line["tokens_per_s"] > 0 and line["peak_bytes"] != 0 for line in lines)


def test_the_last_step_is_always_saved(arguments: list[str], tmp_path: Path) -> None:
    assert main([*arguments, "--out", str(tmp_path / "a"), "--steps", "5", "--save-every", "100"]) == 0
    saved = load(tmp_path / "a" / "checkpoint.pt")
    assert saved["trainer_state"]["step"] == 5
    assert saved["config"]["tokens_processed"] == 80
    assert saved["config"]["batch"] == 2
    assert {name: saved["config"][name] for name in SIZES} == SIZES


def test_without_steps_it_trains_to_the_end_of_the_shard(arguments: list[str], tmp_path: Path) -> None:
    assert main([*arguments, "--out", str(tmp_path / "a"), "--start-token", "1935"]) == 0
    # 65 tokens from there are four batches of 16 and the last target.
    assert [line["token"] for line in losses(tmp_path / "a")] == [1951, 1967, 1983, 1999]


@pytest.mark.parametrize("accum", [1, 3])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(arguments: list[str], tmp_path: Path, accum: int) -> None:
    arguments = [*arguments, "--start-token", "7", "--accum", str(accum)]
    assert main([*arguments, "--out", str(tmp_path / "whole"), "--steps", "9"]) == 0
    for steps in ("3", "4", "9"):
        torch.rand(3)
        assert main([*arguments, "--out", str(tmp_path / "parts"), "--steps", steps]) == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert_same(load(tmp_path / "parts" / "checkpoint.pt"), load(tmp_path / "whole" / "checkpoint.pt"))


def start(arguments: list[str], out: Path, steps: int) -> subprocess.Popen[str]:
    """A run in a process of its own, once it has done a few steps."""
    command = [sys.executable, "-m", "trainer", *arguments, "--out", str(out), "--steps", str(steps)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline_s = time.monotonic() + 60
    path = out / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < 5:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return process


def test_a_killed_run_goes_on_after_its_last_save(arguments: list[str], tmp_path: Path) -> None:
    process = start([*arguments, "--save-every", "3"], tmp_path / "killed", 120)
    process.kill()
    process.communicate()
    saved = load(tmp_path / "killed" / "checkpoint.pt")["trainer_state"]["step"]
    steps = max(saved + 4, 12)
    assert main([*arguments, "--save-every", "3", "--out", str(tmp_path / "killed"), "--steps", str(steps)]) == 0
    assert main([*arguments, "--save-every", "3", "--out", str(tmp_path / "whole"), "--steps", str(steps)]) == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert_same(load(tmp_path / "killed" / "checkpoint.pt"), load(tmp_path / "whole" / "checkpoint.pt"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves_with_its_code(arguments: list[str], tmp_path: Path, number: signal.Signals) -> None:
    process = start([*arguments, "--save-every", "10000"], tmp_path / "a", 120)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number, output
    lines = losses(tmp_path / "a")
    assert load(tmp_path / "a" / "checkpoint.pt")["trainer_state"]["step"] == lines[-1]["step"] == len(lines)


def test_a_finished_run_has_nothing_left_to_do(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main([*arguments, "--out", str(tmp_path / "a"), "--steps", "2"]) == 0
    assert "nothing left to do: step 2, token 32" in capsys.readouterr().out
    assert len(losses(tmp_path / "a")) == 2


def test_a_broken_checkpoint_falls_back_to_the_one_before(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a"
    assert main([*arguments, "--out", str(out), "--steps", "6"]) == 0
    os.truncate(out / "checkpoint.pt", 1000)
    assert main([*arguments, "--out", str(out), "--steps", "8"]) == 0
    assert "checkpoint.pt.prev" in capsys.readouterr().out
    assert [line["step"] for line in losses(out)] == list(range(1, 9))
    for name in ("checkpoint.pt", "checkpoint.pt.prev"):
        (out / name).write_bytes(b"not a checkpoint")
    assert main([*arguments, "--out", str(out), "--steps", "9"]) == 2
    assert "no readable checkpoint" in capsys.readouterr().err


def test_a_save_that_fails_leaves_the_checkpoint_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"model_state": {}, "config": {"n": 1}})

    def full(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(checkpoint.TrainingError, match=r"No space left.*; the checkpoint before it is untouched"):
        checkpoint.save(path, {"model_state": {}, "config": {"n": 2}})
    assert load(path)["config"] == {"n": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_two_workers_cannot_share_a_folder(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    with FileLock(tmp_path / "a" / ".lock"):
        assert main([*arguments, "--out", str(tmp_path / "a"), "--steps", "1"]) == 2
    assert "another worker is training in" in capsys.readouterr().err
    assert not (tmp_path / "a" / "metrics.jsonl").exists()


def test_a_diverged_run_stops_and_keeps_the_last_good_state(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a"
    assert main([*arguments, "--out", str(out), "--steps", "9", "--lr", "1e30", "--save-every", "100"]) == 1
    assert "stopped before that update" in capsys.readouterr().err
    saved = load(out / "checkpoint.pt")
    assert saved["trainer_state"]["step"] == losses(out)[-1]["step"] >= 1
    assert all(value.isfinite().all() for value in saved["model_state"].values())


def test_a_checkpoint_in_out_beats_start_token_and_ckpt_in(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--out", str(tmp_path / "a"), "--steps", "2"]) == 0
    source = str(tmp_path / "a" / "checkpoint.pt")
    more = ["--ckpt-in", source, "--start-token", "100", "--out", str(tmp_path / "b")]
    for steps in ("2", "3"):
        assert main([*arguments, *more, "--steps", steps]) == 0
    assert [line["token"] for line in losses(tmp_path / "b")] == [116, 132, 148]
    assert "resumed from" in capsys.readouterr().out


def test_ckpt_in_takes_the_weights_of_a_compiled_module(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--out", str(tmp_path / "a"), "--steps", "2"]) == 0
    saved = load(tmp_path / "a" / "checkpoint.pt")
    old = {f"_orig_mod.{name}": value for name, value in saved["model_state"].items()}
    torch.save({"model_state": old, "config": {**SIZES, "tokens_processed": 32}}, tmp_path / "old.pt")
    for name in ("old.pt", "a/checkpoint.pt"):
        out = tmp_path / name.replace("/", "_").removesuffix(".pt")
        assert main([*arguments, "--ckpt-in", str(tmp_path / name), "--out", str(out), "--steps", "2"]) == 0
    assert losses(tmp_path / "old") == losses(tmp_path / "a_checkpoint")
    assert losses(tmp_path / "old") != losses(tmp_path / "a")


def test_another_batch_size_goes_on_at_the_token(arguments: list[str], tmp_path: Path) -> None:
    assert main([*arguments, "--out", str(tmp_path / "a"), "--steps", "3"]) == 0
    for batch, steps in (("3", "4"), ("1", "6")):
        assert main([*arguments, "--batch", batch, "--out", str(tmp_path / "a"), "--steps", steps]) == 0
    assert [line["token"] for line in losses(tmp_path / "a")] == [16, 32, 48, 72, 80, 88]


def test_the_gate_temperature_of_the_run_is_kept(arguments: list[str], tmp_path: Path) -> None:
    assert main([*arguments, "--out", str(tmp_path / "a"), "--steps", "1", "--gate-temp", "1.5", "--seed", "4"]) == 0
    assert main([*arguments, "--out", str(tmp_path / "a"), "--steps", "2"]) == 0
    state = load(tmp_path / "a" / "checkpoint.pt")["trainer_state"]
    assert (state["gate_temp"], state["seed"]) == (1.5, 4)


def test_the_environment_names_of_launch_scripts_work(
    small: Path, make_shard: Callable[..., Path], proven_ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "GPU_ID": "3", "BATCH": "1", "SEQ": "4", "LR": "1e-3", "SS_RATE": "1.0", "SS_PROB": "0.5", "LB_COEF": "0.01",
        "GATE_TEMP": "2.0", "START_TOKEN": "10", "CKPT_OUT": str(tmp_path / "brains" / "gpu3.pt"), "CKPT_IN": "",
        "SHARD": str(make_shard()), "CE_CHUNK": "0", "FRACTUS_ATTN_IMPL": "einsum", "BLOCK_CKPT": "0", "COMPILE": "0",
        "ACCUM": "2",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    run = ["run", "--size", str(small), "--device", "cpu", "--ledger", str(proven_ledger), "--recipe", "reference"]
    assert main([*run, "--steps", "2"]) == 0
    state = load(tmp_path / "brains" / "gpu3.pt")["trainer_state"]
    assert state["token"] == 10 + 2 * 2 * 4
    assert state["gate_temp"] == 2.0
    assert state["operators"]["attention"] == "attention/einsum"
    assert state["operators"]["block"] == "block/plain"
    assert state["operators"]["cross_entropy"] == "cross_entropy/dense"
    assert all(line["ss"] is not None for line in losses(tmp_path / "brains" / "gpu3"))
