"""The body reproduces every recorded array of the original, on each recipe and under activation checkpointing."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import registry
from fractus.continuous_engine import ContinuousThoughtEngine
from registry.settings import settings

GOLDEN = Path(__file__).parent / "golden"
FILES = ("lowrank_f32", "lowrank_f64", "dense_experts_f64", "ragged_f64")
RECIPES = ("reference", "production", "production_block_16")
FLOAT64, FLOAT32, FLOAT32_CANCELLING = 1e-10, 5e-5, 3e-4
CANCELLING = ("kuramoto.", "norm_kur.", "level_logits")


def operators(recipe: str) -> dict[str, registry.Bound]:
    """The recipe's callables; ``production_block_16`` is production with the attention block that divides 16 tokens."""
    table = tomllib.loads((settings().recipes / f"{recipe.removesuffix('_block_16')}.toml").read_text())
    options = table.get("options", {})
    if recipe.endswith("_block_16"):
        options = {**options, "attention": {"block": 16}}
    catalogue = registry.load()
    return {
        name: catalogue.bind(f"{name}/{variant}", **options.get(name, {}))
        for name, variant in table["variants"].items()
    }


class Recorded:
    """One golden file: its settings, its arrays, and which of them were compared."""

    def __init__(self, name: str) -> None:
        self.meta: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
        with np.load(GOLDEN / f"{name}.npz") as archive:
            self.arrays = {key: archive[key] for key in archive.files}
        self.dtype = getattr(torch, self.meta["dtype"])
        self.compared = {key for key in self.arrays if key == "tokens" or key.startswith("init/")}
        self.worst: dict[str, float] = {}

    def limit(self, key: str) -> float:
        if self.dtype == torch.float64:
            return FLOAT64
        return FLOAT32_CANCELLING if "/grad/" in key and any(part in key for part in CANCELLING) else FLOAT32

    def compare(self, key: str, actual: torch.Tensor) -> None:
        """Assert the relative norm of the difference to be within the limit, shape and dtype to be equal."""
        expected = torch.from_numpy(self.arrays[key])
        assert actual.shape == expected.shape, f"{key}: shape {tuple(actual.shape)}, recorded {tuple(expected.shape)}"
        assert actual.dtype == expected.dtype, f"{key}: {actual.dtype}, recorded {expected.dtype}"
        difference = (actual.detach().double() - expected.double()).norm().item()
        error = difference / max(expected.double().norm().item(), 1e-300) if difference else 0.0
        assert error <= self.limit(key), f"{key}: relative error {error:.3e} above {self.limit(key):.0e}"
        self.compared.add(key)
        self.worst[key] = error / self.limit(key)

    def compare_carry(self, prefix: str, engine: ContinuousThoughtEngine) -> None:
        state = engine.state_dict()
        for key in [key for key in self.arrays if key.startswith(f"{prefix}/carry/")]:
            self.compare(key, state[key.removeprefix(f"{prefix}/carry/")])


def built(recorded: Recorded, recipe: str) -> ContinuousThoughtEngine:
    """The engine with the recorded initial state."""
    engine = ContinuousThoughtEngine(**recorded.meta["config"]).to(recorded.dtype).use(operators(recipe))
    engine.reset_thought(recorded.meta["batch"])
    initial = {
        k.removeprefix("init/"): torch.from_numpy(v) for k, v in recorded.arrays.items() if k.startswith("init/")
    }
    constants = {
        name: value for name, value in engine.state_dict().items() if name.endswith(("level_offsets", "expert_phases"))
    }
    for name, value in constants.items():
        assert torch.equal(value, initial[name]), f"{name} is not what the original computes"
    engine.load_state_dict(initial)
    for block in engine.blocks:
        block.moe.temperature = recorded.meta["gate_temperature"]
    return engine


def train(recorded: Recorded, engine: ContinuousThoughtEngine, recipe: str, block_ckpt: bool) -> None:
    """Every recorded chunk: forward, backward, clip and SGD step, each array compared."""
    meta = recorded.meta
    B, C = meta["batch"], meta["chunk"]
    tokens = torch.from_numpy(recorded.arrays["tokens"]).long()
    step = operators(recipe)["optimizer_step"]
    parameters = list(engine.parameters())
    momentum = [torch.zeros_like(parameter) for parameter in parameters]
    for chunk in range(meta["chunks"]):
        start = chunk * B * C
        inputs, targets = tokens[start : start + B * C].view(B, C), tokens[start + 1 : start + 1 + B * C].view(B, C)
        ce, lb, hidden = engine.tick_chunk_train_ce(inputs, targets, return_hidden=True, block_ckpt=block_ckpt)
        engine.zero_grad(set_to_none=True)
        (ce + meta["lb_coef"] * lb).backward()
        recorded.compare(f"chunk{chunk}/logits", engine.output_head(hidden))
        recorded.compare(f"chunk{chunk}/ce", ce)
        recorded.compare(f"chunk{chunk}/lb", lb)
        for name, parameter in engine.named_parameters():
            if parameter.grad is not None:
                recorded.compare(f"chunk{chunk}/grad/{name}", parameter.grad)
        recorded.compare_carry(f"chunk{chunk}", engine)
        norm = step(parameters, momentum, meta["lr"], meta["momentum"], meta["clip"])
        recorded.compare(f"chunk{chunk}/grad_norm", norm)


def generate(recorded: Recorded, engine: ContinuousThoughtEngine) -> None:
    """Single ticks after a reset, then one chunk after another."""
    B, C = recorded.meta["batch"], recorded.meta["chunk"]
    tokens = torch.from_numpy(recorded.arrays["tokens"]).long()
    engine.reset_thought(B)
    with torch.no_grad():
        for t in range(sum(key.endswith("/confidence") for key in recorded.arrays)):
            logits, confidence = engine.tick(tokens[t * B : (t + 1) * B])
            recorded.compare(f"tick{t}/logits", logits)
            recorded.compare(f"tick{t}/confidence", confidence)
        recorded.compare_carry("tick", engine)
        engine.reset_thought(B)
        recorded.compare("tick_chunk/logits", engine.tick_chunk(tokens[: B * C].view(B, C)))


@pytest.mark.parametrize("block_ckpt", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", FILES)
def test_every_recorded_array_is_reproduced(name: str, recipe: str, block_ckpt: bool) -> None:
    recorded = Recorded(name)
    engine = built(recorded, recipe)
    train(recorded, engine, recipe, block_ckpt)
    for key, value in engine.state_dict().items():
        recorded.compare(f"final/{key}", value)
    generate(recorded, engine)
    assert set(recorded.arrays) == recorded.compared
    worst = max(recorded.worst, key=recorded.worst.__getitem__)
    print(f"{name} {recipe}: worst {worst}, {recorded.worst[worst]:.2e} of its limit")
