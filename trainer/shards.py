"""A shard: one flat int32 ``.npy`` of token ids, opened without reading it and checked before training on it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.errors import UsageError

Tokens: TypeAlias = npt.NDArray[np.int32]
PIECE_TOKENS = 1 << 20
REMEDY = "a shard is one flat int32 array in a .npy file, as `python -m trainer data tokenize` writes it"


def open_shard(path: Path) -> Tokens:
    """Map the shard into memory, read-only; ``UsageError`` says what is wrong with the file."""
    if not path.is_file():
        raise UsageError(f"no shard {path}: {REMEDY}")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        detail = " ".join(str(error).split()).rstrip(".")
        raise UsageError(
            f"shard {path} ({path.stat().st_size} bytes) is truncated or not .npy: {detail}; {REMEDY}"
        ) from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise UsageError(f"shard {path} is an archive of arrays; {REMEDY}")
    if array.dtype != np.int32 or array.ndim != 1:
        raise UsageError(f"shard {path} holds {array.dtype} of shape {array.shape}; {REMEDY}")
    return array


def check_ids(path: Path, shard: Tokens, start: int, stop: int, vocab_size: int) -> None:
    """Raise ``UsageError`` for the first id of ``shard[start:stop]`` outside the vocabulary, in bounded memory."""
    for low in range(start, stop, PIECE_TOKENS):
        piece = shard[low : min(low + PIECE_TOKENS, stop)]
        if int(piece.min()) < 0 or int(piece.max()) >= vocab_size:
            index = int(np.argmax((piece < 0) | (piece >= vocab_size)))
            raise UsageError(
                f"shard {path}: token {low + index} has id {int(piece[index])}, "
                f"outside the vocabulary 0..{vocab_size - 1}; "
                "tokenize it for this vocabulary or give the --size that it was made for"
            )


def fingerprint(shard: Tokens) -> str:
    """SHA-256 over the length and the first and last tokens: enough to notice that another shard is given on resume."""
    digest = hashlib.sha256(str(shard.size).encode())
    for end in (shard[: 1 << 14], shard[-(1 << 14) :]):
        digest.update(end.tobytes())
    return digest.hexdigest()
