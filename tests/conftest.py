"""What the tests share: a proven ledger, a small engine's sizes, shards of random tokens, the trainer's arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import registry
from trainer import checks
from trainer.configuration import RunConfiguration

RESOLVED: dict[tuple[str, ...], registry.Resolved] = {}
ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 2,
    "d_head": 8,
    "n_levels": 2,
    "n_oscillators": 4,
    "coupling_rank": 2,
    "n_experts": 4,
    "top_k": 2,
    "expert_d_ff": 12,
    "siren_rank": 4,
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """One thread, here and in processes that tests start: nothing gained by more, and sums keep their order."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def proven_ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger in which both recipes are proven for this torch: one given, the checkout's, or a new one."""
    for given in (os.environ.get("FRACTUS_TEST_LEDGER"), str(registry.Ledger().folder)):
        if given and is_current(Path(given)):
            return Path(given)
    folder = tmp_path_factory.mktemp("ledger")
    for recipe in ("reference", "production"):
        command = [sys.executable, "-m", "proofs", "--recipe", recipe, "--device", "cpu", "--dtype", "float32"]
        done = subprocess.run(
            [*command, "--ledger", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def is_current(folder: Path) -> bool:
    try:
        for recipe in ("reference", "production"):
            registry.resolve(recipe, "cpu", "float32", ledger=registry.Ledger(folder))
    except registry.UnprovenVariantError:
        return False
    return True


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A TOML file with a small engine's sizes."""
    path = tmp_path / "small.toml"
    path.write_text("".join(f"{name} = {value}\n" for name, value in SIZES.items()))
    return path


@pytest.fixture
def make_shard(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a shard of random tokens."""

    def make(tokens: int = 2000, name: str = "shard.npy", vocabulary: int = VOCABULARY) -> Path:
        path = tmp_path / name
        np.save(path, np.random.default_rng(tokens).integers(0, vocabulary, tokens, dtype=np.int32))
        return path

    return make


@pytest.fixture
def arguments(small: Path, make_shard: Callable[..., Path], proven_ledger: Path) -> list[str]:
    """The arguments of a small run, all but ``--out`` and ``--steps``."""
    return [
        "run", "--shard", str(make_shard()), "--size", str(small), "--device", "cpu", "--ledger", str(proven_ledger),
        "--batch", "2", "--seq", "8", "--lr", "0.05", "--ss-rate", "0.5", "--save-every", "2",
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _resolve_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources do not change while tests run, so a recipe that was resolved from a ledger stays so."""

    def resolve(recipe: registry.Recipe, device: Any, dtype: str, ledger: registry.Ledger) -> registry.Resolved:
        key = (recipe.name, str(device), dtype, str(ledger.folder))
        if key not in RESOLVED:
            RESOLVED[key] = real(recipe, device, dtype, ledger=ledger)
        return RESOLVED[key]

    real = registry.resolve
    monkeypatch.setattr(checks.registry, "resolve", resolve)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in RunConfiguration.model_fields.values():
        if field.validation_alias:
            monkeypatch.delenv(str(field.validation_alias), raising=False)
