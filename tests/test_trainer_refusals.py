"""Bad input: one line that names the thing and what would be right, exit code 2, nothing written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.__main__ import main


@pytest.fixture
def refused(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run with changed arguments, expect exit code 2, one line and no output folder; returns the line."""

    def run(*changed: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main([*arguments, "--out", str(tmp_path / "out"), "--steps", "2", *changed]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        lines = output.err.splitlines()
        assert len(lines) == 1
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0]

    return run


def test_a_missing_shard(refused: Callable[..., str], tmp_path: Path) -> None:
    line = refused("--shard", str(tmp_path / "none.npy"))
    assert "no shard" in line
    assert "none.npy" in line
    assert "data tokenize" in line


def test_a_truncated_shard(refused: Callable[..., str], make_shard: Callable[..., Path]) -> None:
    path = make_shard(500, "cut.npy")
    path.write_bytes(path.read_bytes()[:1000])
    assert "cut.npy (1000 bytes) is truncated or not .npy" in refused("--shard", str(path))


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"plain text, not numbers"])
def test_a_file_that_is_not_npy(refused: Callable[..., str], tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd.npy").write_bytes(content)
    assert "is truncated or not .npy" in refused("--shard", str(tmp_path / "odd.npy"))


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.zeros(500, np.int64), "holds int64 of shape (500,)"),
        (np.zeros(500, np.uint16), "holds uint16"),
        (np.zeros((50, 10), np.int32), "shape (50, 10)"),
        (np.zeros(500, np.float32), "holds float32"),
        (np.zeros(500, ">i4"), "holds >i4"),
    ],
)
def test_a_shard_of_another_kind(refused: Callable[..., str], tmp_path: Path, array: np.ndarray, named: str) -> None:
    np.save(tmp_path / "kind.npy", array)
    line = refused("--shard", str(tmp_path / "kind.npy"))
    assert named in line
    assert "one flat int32 array" in line


@pytest.mark.parametrize("token", [61, -1, 50256])
def test_ids_outside_the_vocabulary(refused: Callable[..., str], tmp_path: Path, token: int) -> None:
    tokens = np.zeros(500, np.int32)
    tokens[32] = token
    np.save(tmp_path / "ids.npy", tokens)
    line = refused("--shard", str(tmp_path / "ids.npy"))
    assert f"token 32 has id {token}, outside the vocabulary 0..60" in line


def test_ids_that_are_not_read_are_not_judged(arguments: list[str], tmp_path: Path) -> None:
    tokens = np.zeros(500, np.int32)
    tokens[33] = -1
    np.save(tmp_path / "ids.npy", tokens)
    assert main([*arguments, "--shard", str(tmp_path / "ids.npy"), "--out", str(tmp_path / "out"), "--steps", "2"]) == 0


def test_a_shard_shorter_than_a_step(refused: Callable[..., str], make_shard: Callable[..., Path]) -> None:
    line = refused("--shard", str(make_shard(16, "short.npy")))
    assert "short.npy has 16 tokens" in line
    assert "needs at least 17" in line


def test_the_shortest_shard_trains(arguments: list[str], make_shard: Callable[..., Path], tmp_path: Path) -> None:
    shard = make_shard(17, "least.npy")
    assert main([*arguments, "--shard", str(shard), "--out", str(tmp_path / "out")]) == 0


def test_a_start_beyond_the_shard(refused: Callable[..., str]) -> None:
    assert "has 2000 tokens; one step from token 1990" in refused("--start-token", "1990")


@pytest.mark.parametrize(
    ("recipe", "near"),
    [
        ("prodution", "did you mean 'production'"),
        ("attention=chunkd", "did you mean 'chunked'"),
        ("atention=chunked", "did you mean 'attention'"),
        ("none.toml", "no recipe 'none.toml'"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(refused: Callable[..., str], recipe: str, near: str) -> None:
    assert near in refused("--recipe", recipe)


def test_an_unproven_recipe(refused: Callable[..., str], tmp_path: Path) -> None:
    line = refused("--ledger", str(tmp_path / "empty"), "--recipe", "reference,attention=chunked")
    assert "is not proven on cpu float32" in line
    assert "python -m proofs --operator" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_there(refused: Callable[..., str]) -> None:
    assert "no CUDA device here" in refused("--device", "cuda")


def test_an_unknown_device(refused: Callable[..., str]) -> None:
    assert "device 'tpu' is not cpu or cuda" in refused("--device", "tpu")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (("--batch", "0"), "--batch (or BATCH) should be greater than or equal to 1, not '0'"),
        (("--seq", "eight"), "--seq (or SEQ) should be a valid integer, not 'eight'"),
        (("--lr", "nan"), "--lr (or LR) should be"),
        (("--lr", "-1"), "--lr (or LR) should be greater than 0"),
        (("--ss-rate", "1.5"), "--ss-rate (or SS_RATE) should be less than or equal to 1"),
        (("--steps", "0"), "--steps should be"),
        (("--ce-chunk", "3"), "ce_chunk=3 lies outside the proven range"),
        (("--dtype", "float16"), "dtype 'float16' is not one of float32, float64, bfloat16_autocast"),
        (("--size", "huge"), "no size 'huge': it is 1b, tiny or a TOML file"),
    ],
)
def test_an_invalid_value(refused: Callable[..., str], changed: tuple[str, str], named: str) -> None:
    assert named in refused(*changed)


def test_a_wrong_size_file(refused: Callable[..., str], small: Path) -> None:
    text = small.read_text()
    small.write_text(text.replace("n_layers", "n_layer"))
    assert "no size 'n_layer'; did you mean 'n_layers'?" in refused()
    small.write_text(text.replace("d_model = 16", "d_model = 18"))
    assert "d_model has to be n_heads * d_head = 16, not 18" in refused()
    small.write_text(text.replace("n_layers = 2", "n_layers = 2.5"))
    assert "n_layers has to be an integer of at least 1, not 2.5" in refused()


def test_compiled_blocks_are_said_to_be_missing(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILE", "1")
    assert "compiled blocks are not available yet" in refused()


def test_no_output_folder(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "give --out DIR" in capsys.readouterr().err


def test_a_file_where_the_folder_goes(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    assert "is a file" in refused()


def test_a_missing_checkpoint(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "no checkpoint" in refused("--ckpt-in", str(tmp_path / "none.pt"))


def trained(arguments: list[str], out: Path) -> Path:
    assert main([*arguments, "--out", str(out), "--steps", "1"]) == 0
    return out / "checkpoint.pt"


def test_a_checkpoint_of_another_architecture(
    arguments: list[str], refused: Callable[..., str], small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trained(arguments, tmp_path / "other")
    content = torch.load(path, weights_only=True)
    torch.save({"model_state": content["model_state"], "config": {}}, tmp_path / "bare.pt")
    small.write_text(small.read_text().replace("n_layers = 2", "n_layers = 3"))
    capsys.readouterr()
    assert "another architecture: n_layers is 2 in the checkpoint, 3 here" in refused("--ckpt-in", str(path))
    assert "another architecture: the checkpoint has no" in refused("--ckpt-in", str(tmp_path / "bare.pt"))


def test_another_shard_on_resume(
    arguments: list[str], make_shard: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(arguments, tmp_path / "a")
    other = make_shard(1999, "other.npy")
    assert main([*arguments, "--out", str(tmp_path / "a"), "--steps", "2", "--shard", str(other)]) == 2
    assert "was trained on another shard (2000 tokens)" in capsys.readouterr().err


def test_a_checkpoint_that_would_run_code(refused: Callable[..., str], tmp_path: Path) -> None:
    torch.save({"model_state": {}, "config": {"hook": test_a_missing_checkpoint}}, tmp_path / "code.pt")
    assert "code.pt" in refused("--ckpt-in", str(tmp_path / "code.pt"))
