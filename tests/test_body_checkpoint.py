"""Checkpoints of the existing format: what loads, what is sliced or skipped, what is refused unread."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from fractus.checkpoint import load_checkpoint, load_into, save_state
from fractus.continuous_engine import ContinuousThoughtEngine

TINY = {
    "vocab_size": 31,
    "d_model": 12,
    "n_layers": 2,
    "n_heads": 3,
    "d_head": 4,
    "n_levels": 2,
    "n_oscillators": 5,
    "coupling_rank": 2,
    "n_experts": 6,
    "top_k": 2,
    "expert_d_ff": 7,
    "siren_rank": 3,
}
SIXTEEN = {**TINY, "n_layers": 16}


def trained(sizes: dict[str, int] = TINY, batch: int = 3) -> ContinuousThoughtEngine:
    """An engine after one chunk: its carry is sized to the batch, its phases to (batch, 8, N)."""
    torch.manual_seed(0)
    engine = ContinuousThoughtEngine(**sizes)
    engine.reset_thought(batch)
    engine.tick_chunk(torch.randint(31, (batch, 8)))
    return engine


def written(path: Path, engine: ContinuousThoughtEngine, prefix: str = "", **changes: Any) -> Path:
    """A checkpoint file of the engine, its keys prefixed, its config changed."""
    content = save_state(engine, tokens_processed=1024)
    content["model_state"] = {prefix + name: value for name, value in content["model_state"].items()}
    content["config"] |= changes
    torch.save(content, path)
    return path


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod."])
def test_prefixed_keys_load_everything(tmp_path: Path, prefix: str) -> None:
    engine = trained()
    path = written(tmp_path / "c.pt", engine, prefix)
    loaded = ContinuousThoughtEngine.from_pretrained(path)
    for (name, expected), actual in zip(engine.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(expected, actual), name
    assert loaded.output_head.weight is loaded.observe.weight
    assert torch.equal(loaded.thought_state, engine.thought_state[:1])
    assert torch.equal(loaded.blocks[1].attn_S, engine.blocks[1].attn_S[:1])
    assert loaded.blocks[0].kuramoto_phases.shape == (1, 1, 5)


def test_424_of_440_entries_load_into_a_reset_engine_of_the_same_batch() -> None:
    state = save_state(trained(SIXTEEN), tokens_processed=0)["model_state"]
    engine = ContinuousThoughtEngine(**SIXTEEN)
    engine.reset_thought(3)
    report = load_into(engine, state)
    assert len(state) == 440
    assert (report.count, len(report.loaded), report.missing) == (424, 424, ())
    assert set(report.skipped) == {f"blocks.{i}.kuramoto_phases" for i in range(16)}
    assert str(report) == "loaded_tensors=424 (0 sliced), skipped 16, missing 0"


def test_a_longer_carry_gives_its_first_rows_and_a_shorter_one_is_skipped() -> None:
    source = trained(SIXTEEN)
    state = save_state(source, tokens_processed=0)["model_state"]
    single = ContinuousThoughtEngine(**SIXTEEN)
    report = load_into(single, state)
    assert (len(report.loaded), len(report.sliced), len(report.skipped)) == (391, 33, 16)
    assert torch.equal(single.blocks[3].attn_z, source.blocks[3].attn_z[:1])
    wide = ContinuousThoughtEngine(**SIXTEEN)
    wide.reset_thought(4)
    report = load_into(wide, state)
    assert (report.count, len(report.skipped)) == (391, 49)
    assert torch.equal(wide.thought_state, torch.zeros(4, 1, 12))


def test_a_loaded_carry_continues_the_run() -> None:
    source = trained()
    state = save_state(source, tokens_processed=0)["model_state"]
    engine = ContinuousThoughtEngine(**TINY)
    engine.reset_thought(3)
    load_into(engine, state)
    tokens = torch.randint(31, (3, 8))
    assert torch.equal(engine.tick_chunk(tokens), source.tick_chunk(tokens))


def test_absent_carries_are_reported_missing() -> None:
    state = save_state(trained(), tokens_processed=0)["model_state"]
    report = load_into(ContinuousThoughtEngine(**TINY), {k: v for k, v in state.items() if "attn_S" not in k})
    assert report.missing == ("blocks.0.attn_S", "blocks.1.attn_S")


@pytest.mark.parametrize(
    ("size", "value"), [("n_experts", 8), ("n_layers", 3), ("vocab_size", 40), ("siren_rank", 0), ("n_oscillators", 6)]
)
def test_another_architecture_is_refused_and_nothing_is_loaded(tmp_path: Path, size: str, value: int) -> None:
    path = written(tmp_path / "c.pt", trained({**TINY, size: value}))
    state, config = load_checkpoint(path)
    engine = ContinuousThoughtEngine(**TINY)
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    with pytest.raises(ValueError, match=size):
        load_into(engine, state, config)
    with pytest.raises(ValueError, match=r"another architecture: .*'"):
        load_into(engine, state)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state_dict().items())


def test_nothing_in_common_is_an_error_and_not_random_weights() -> None:
    engine = ContinuousThoughtEngine(**TINY)
    with pytest.raises(ValueError, match=r"has no 'observe\.weight'"):
        load_into(engine, {"wrapped." + name: value for name, value in engine.state_dict().items()})


class Hostile:
    """Runs a command when unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.target}",)


def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    content = save_state(trained(), tokens_processed=0)
    content["config"]["note"] = Hostile(target)
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="not a checkpoint of tensors"):
        load_checkpoint(tmp_path / "c.pt")
    assert not target.exists()
    subprocess.run(["touch", str(target)], check=True)
    assert target.exists()


def test_foreign_and_truncated_files_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "c.pt", trained())
    whole = path.read_bytes()
    for name, content in (("truncated", whole[: len(whole) // 2]), ("empty", b""), ("text", b"hello world")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            load_checkpoint(tmp_path / name)
    with pytest.raises(ValueError, match="no checkpoint"):
        load_checkpoint(tmp_path / "absent.pt")
    for name, value, message in (
        ("list", [1], "model_state"),
        ("bare", {"a": torch.zeros(1)}, "model_state"),
        ("no_config", {"model_state": {}}, "config"),
        ("number", {"model_state": {"a": 1}, "config": {}}, "no tensor"),
    ):
        torch.save(value, tmp_path / name)
        with pytest.raises(ValueError, match=message):
            load_checkpoint(tmp_path / name)


def test_a_saved_state_is_a_copy_and_names_its_batch() -> None:
    engine = trained()
    content = save_state(engine, tokens_processed=7, lane=2)
    assert content["config"] == {**TINY, "tokens_processed": 7, "batch": 3, "lane": 2}
    before = content["model_state"]["observe.weight"].clone()
    with torch.no_grad():
        engine.observe.weight.zero_()
    assert torch.equal(content["model_state"]["observe.weight"], before)
    assert content["model_state"]["output_head.weight"] is content["model_state"]["observe.weight"]
