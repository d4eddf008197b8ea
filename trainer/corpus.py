"""Text to shards: documents in order, each closed by the end-of-text token, every token in exactly one shard."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fractus.tokenizer import FractusTokenizer
from trainer import shards
from trainer.errors import UsageError

MANIFEST = "manifest.json"
SUFFIXES = (".txt", ".md", ".rst", ".py")


def tokenize(sources: Iterable[Path], out: Path, count: int) -> dict[str, Any]:
    """Write ``count`` shards whose lengths differ by one token at most, and the manifest last; returns the manifest.

    Raises ``UsageError``, before anything is written, for sources that are missing or hold no text file.
    """
    if count < 1:
        raise UsageError(f"--shards has to be at least 1, not {count}")
    files = list(find_files(sources))
    tokenizer = _tokenizer()
    for path in files:
        read_text(path)
    out.mkdir(parents=True, exist_ok=True)
    stream = out / "tokens.tmp"
    documents = write_stream(tokenizer, files, stream)
    total = stream.stat().st_size // 4
    if total < count:
        stream.unlink()
        raise UsageError(f"{len(files)} files gave {total} tokens, too few for {count} shards")
    written = split_stream(stream, out, count)
    stream.unlink()
    manifest = {
        "schema_version": 1,
        "tokenizer": "gpt2",
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "documents": documents,
        "total_tokens": total,
        "shards": written,
    }
    temporary = out / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, out / MANIFEST)
    return manifest


def find_files(sources: Iterable[Path]) -> Iterator[Path]:
    """Files as given, and of folders every text file below in sorted order; ``UsageError`` where there is none."""
    for source in sources:
        if source.is_file():
            yield source
        elif source.is_dir():
            found = sorted(path for path in source.rglob("*") if path.suffix in SUFFIXES and path.is_file())
            if not found:
                raise UsageError(f"{source} holds no text file ({', '.join(SUFFIXES)})")
            yield from found
        else:
            raise UsageError(f"no source {source}")


def read_text(path: Path) -> str:
    """The text, line ends as they are, without a byte order mark; ``UsageError`` for bytes that are not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8: {error.reason} at byte {error.start}; convert it or leave it out"
        ) from None


def write_stream(tokenizer: FractusTokenizer, files: Iterable[Path], stream: Path) -> int:
    """Write all documents' ids as int32, one document in memory at a time; returns how many were not empty."""
    documents = 0
    with stream.open("wb") as target:
        for path in files:
            ids = tokenizer.encode(read_text(path))
            if ids:
                documents += 1
                target.write(np.array([*ids, tokenizer.end_of_text], dtype=np.int32).tobytes())
    return documents


def split_stream(stream: Path, out: Path, count: int) -> list[dict[str, Any]]:
    """Cut the stream into ``count`` ``.npy`` files; returns their manifest entries."""
    tokens = np.memmap(stream, dtype=np.int32, mode="r")
    entries, start = [], 0
    for index in range(count):
        length = tokens.size // count + (index < tokens.size % count)
        name = f"shard_{index}.npy"
        temporary = out / f"{name}.tmp"
        with temporary.open("wb") as target:
            np.save(target, tokens[start : start + length])
        os.replace(temporary, out / name)
        entries.append({"file": name, "start_token": start, "tokens": length, "sha256": sha256(out / name)})
        start += length
    assert start == tokens.size
    return entries


def verify(folder: Path) -> list[str]:
    """What differs between the shards and their manifest, a line each; ``UsageError`` when there is no manifest."""
    path = folder / MANIFEST
    if not path.is_file():
        raise UsageError(f"no {path}; `python -m trainer data tokenize` writes it")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        entries = [
            (folder / e["file"], int(e["start_token"]), int(e["tokens"]), e["sha256"]) for e in manifest["shards"]
        ]
        total, vocab_size = int(manifest["total_tokens"]), int(manifest["vocab_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a manifest of shards ({type(error).__name__}: {error})") from None
    problems, expected = [], 0
    for shard_path, start, tokens, digest in entries:
        if start != expected:
            problems.append(
                f"{shard_path.name} starts at token {start} of the stream, the one before it ends at {expected}"
            )
        expected = start + tokens
        problems += [f"{shard_path.name}: {problem}" for problem in check_shard(shard_path, tokens, digest, vocab_size)]
    if expected != total:
        problems.append(f"the shards hold {expected} tokens, the manifest says {total}")
    return problems


def check_shard(path: Path, tokens: int, digest: str, vocab_size: int) -> Iterator[str]:
    """What is wrong with one shard."""
    try:
        shard = shards.open_shard(path)
        shards.check_ids(path, shard, 0, shard.size, vocab_size)
    except UsageError as error:
        yield str(error)
        return
    if shard.size != tokens:
        yield f"{shard.size} tokens, the manifest says {tokens}"
    if sha256(path) != digest:
        yield "its SHA-256 is not the manifest's"


def inspect(path: Path, at: int, count: int) -> str:
    """The text of ``count`` tokens from ``at`` on."""
    shard = shards.open_shard(path)
    if not 0 <= at < shard.size:
        raise UsageError(f"shard {path} has tokens 0..{shard.size - 1}, not {at}")
    tokenizer = _tokenizer()
    shards.check_ids(path, shard, at, min(at + count, shard.size), tokenizer.vocab_size)
    return tokenizer.decode(shard[at : at + count].tolist())


def sha256(path: Path) -> str:
    """The file's SHA-256, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tokenizer() -> FractusTokenizer:
    try:
        return FractusTokenizer.gpt2_compatible()
    except ValueError as error:
        raise UsageError(str(error)) from None
