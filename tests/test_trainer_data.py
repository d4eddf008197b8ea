"""Shards: every token in exactly one, documents closed by end-of-text, and a manifest that is checked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fractus.tokenizer import FractusTokenizer
from trainer.__main__ import main

TEXTS = {"a.txt": "Hello world\r\n", "b.md": "", "sub/c.py": "x = 'é'\n" * 30, "z.txt": "\ufeffbyte order mark"}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (tmp_path / "text" / "ignored.bin").write_bytes(b"\xff")
    return tmp_path / "text"


@pytest.mark.parametrize("count", [1, 2, 7])
def test_every_token_is_in_exactly_one_shard(sources: Path, tmp_path: Path, count: int) -> None:
    out = tmp_path / "out"
    assert main(["data", "tokenize", str(sources), "-o", str(out), "--shards", str(count)]) == 0
    tokenizer = FractusTokenizer.gpt2_compatible()
    expected: list[int] = []
    for name in ("a.txt", "sub/c.py", "z.txt"):
        expected += [*tokenizer.encode(TEXTS[name].removeprefix("\ufeff")), 50256]
    pieces = [np.load(out / f"shard_{index}.npy") for index in range(count)]
    assert all(piece.dtype == np.int32 for piece in pieces)
    assert np.concatenate(pieces).tolist() == expected
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["total_tokens"] == len(expected) == sum(entry["tokens"] for entry in manifest["shards"])
    assert manifest["documents"] == 3
    assert not list(out.glob("*.tmp"))
    assert main(["data", "verify", str(out)]) == 0


def test_verify_finds_a_changed_a_short_and_a_missing_shard(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["data", "tokenize", str(sources), "-o", str(out), "--shards", "3"]) == 0
    tokens = np.load(out / "shard_0.npy")
    np.save(out / "shard_0.npy", np.maximum(tokens - 1, 0))
    np.save(out / "shard_1.npy", tokens[:5])
    (out / "shard_2.npy").unlink()
    capsys.readouterr()
    assert main(["data", "verify", str(out)]) == 1
    output = capsys.readouterr().out
    assert "shard_0.npy: its SHA-256 is not the manifest's" in output
    assert "shard_1.npy: 5 tokens, the manifest says" in output
    assert "shard_2.npy: no shard" in output


def test_inspect_prints_the_text(sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "tokenize", str(sources), "-o", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert main(["data", "inspect", str(tmp_path / "out" / "shard_0.npy"), "--at", "1", "--tokens", "1"]) == 0
    assert capsys.readouterr().out == " world\n"
    assert main(["data", "inspect", str(tmp_path / "out" / "shard_0.npy"), "--at", "100000"]) == 2


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["missing.txt"], "no source missing.txt"),
        (["--shards", "0"], "--shards has to be at least 1"),
        (["{sources}/ignored.bin"], "ignored.bin is not UTF-8: invalid start byte at byte 0"),
    ],
)
def test_bad_sources_write_nothing(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], named: str
) -> None:
    extra = [each.format(sources=sources) for each in extra]
    assert main(["data", "tokenize", str(sources), *extra, "-o", str(tmp_path / "out")]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
