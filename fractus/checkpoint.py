"""Checkpoints in the existing format: read without running code, loaded with a report, written as a dictionary."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SIZES = (
    "vocab_size",
    "d_model",
    "n_layers",
    "n_heads",
    "d_head",
    "n_levels",
    "n_oscillators",
    "coupling_rank",
    "n_experts",
    "top_k",
    "expert_d_ff",
    "siren_rank",
)
PREFIXES = ("_orig_mod.", "module.")
CARRY = ("thought_state", "attn_S", "attn_z", "kuramoto_phases")


@dataclass(frozen=True)
class LoadReport:
    """What became of every name: equal shapes, first rows of a longer one, left out, or absent from the checkpoint."""

    loaded: tuple[str, ...]
    sliced: tuple[str, ...]
    skipped: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def count(self) -> int:
        """Entries that took values from the checkpoint."""
        return len(self.loaded) + len(self.sliced)

    def __str__(self) -> str:
        return (
            f"loaded_tensors={self.count} ({len(self.sliced)} sliced), "
            f"skipped {len(self.skipped)}, missing {len(self.missing)}"
        )


def load_checkpoint(
    path: str | Path, map_location: str | torch.device = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The (model_state, config) of a file written by torch.save, without running code from it; prefixes are kept.

    ``ValueError`` for a missing, truncated or foreign file, and for anything in it but tensors and plain values.
    """
    if not Path(path).is_file():
        raise ValueError(f"no checkpoint {path}")
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, AttributeError, OSError) as error:
        raise ValueError(f"{path} is not a checkpoint of tensors and plain values: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_state"), dict):
        found = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path} holds no 'model_state' dictionary but {found}")
    state, config = content["model_state"], content.get("config")
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no 'config' dictionary but {type(config).__name__}")
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{path}: model_state[{name!r}] is no tensor but {type(value).__name__}")
    return state, config


def stripped(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state under bare names, ``_orig_mod.`` and ``module.`` taken off; ``ValueError`` if two become one."""
    bare: dict[str, Tensor] = {}
    for name, value in state.items():
        short = name
        while short.startswith(PREFIXES):
            short = short[len(next(prefix for prefix in PREFIXES if short.startswith(prefix))) :]
        if short in bare:
            raise ValueError(f"the checkpoint holds {short!r} twice, once as {name!r}")
        bare[short] = value
    return bare


def check_config(engine: nn.Module, config: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` naming the first size in which a checkpoint's config differs from the engine's."""
    for name in SIZES:
        if name in config and config[name] != engine.config[name]:
            raise ValueError(
                f"another architecture: {name} is {config[name]} in the checkpoint, {engine.config[name]} here"
            )


def load_into(engine: nn.Module, state: Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> LoadReport:
    """Load a state, prefixes stripped, and report every name.

    Equal shapes load; a carry that is longer along dimension 0 only gives its first rows; any other carry is skipped
    and keeps its present value. ``ValueError`` naming the first thing that makes it another architecture: a size of
    ``config`` (where given), a parameter or constant absent, unknown or of another shape. Nothing is loaded then.
    """
    if config is not None:
        check_config(engine, config)
    bare, own = stripped(state), engine.state_dict()
    check_names(bare, own)
    taken: dict[str, Tensor] = {}
    report: dict[str, list[str]] = {"loaded": [], "sliced": [], "skipped": [], "missing": []}
    for name, present in own.items():
        value = bare.get(name)
        outcome = _outcome(value, present)
        report[outcome].append(name)
        if value is not None and outcome in ("loaded", "sliced"):
            taken[name] = value[: present.shape[0]] if outcome == "sliced" else value
    engine.load_state_dict({**own, **taken})
    return LoadReport(**{outcome: tuple(names) for outcome, names in report.items()})


def check_names(bare: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` naming the first entry that is not a carry and is absent, unknown or of another shape."""
    for name, present in own.items():
        if is_carry(name) or name == "last_lb_loss":
            continue
        if name not in bare:
            raise ValueError(f"another architecture: the checkpoint has no {name!r} {tuple(present.shape)}")
        if bare[name].shape != present.shape:
            shapes = f"{tuple(bare[name].shape)} in the checkpoint, {tuple(present.shape)} here"
            raise ValueError(f"another architecture: {name!r} is {shapes}")
    for name, value in bare.items():
        if name not in own:
            raise ValueError(f"another architecture: {name!r} {tuple(value.shape)} of the checkpoint is unknown here")


def is_carry(name: str) -> bool:
    """Whether a state-dict name is sized to the batch and is not the model's."""
    return name.rpartition(".")[2] in CARRY


def _outcome(value: Tensor | None, present: Tensor) -> str:
    if value is None:
        return "missing"
    if value.shape == present.shape:
        return "loaded"
    longer = value.dim() == present.dim() > 0 and value.shape[1:] == present.shape[1:] and len(value) > len(present)
    return "sliced" if longer else "skipped"


def save_state(engine: nn.Module, tokens_processed: int, **extra: Any) -> dict[str, Any]:
    """The dictionary of the existing format, to be written by torch.save: detached copies, so that training may go on.

    ``{"model_state": ..., "config": {sizes, "tokens_processed", "batch", **extra}}``.
    """
    state = {name: tensor.detach().clone() for name, tensor in engine.state_dict().items()}
    # Tied in the engine, tied in the file: torch.save writes one storage.
    state["output_head.weight"] = state["observe.weight"]
    batch = int(state["thought_state"].shape[0])
    return {
        "model_state": state,
        "config": {**engine.config, "tokens_processed": tokens_processed, "batch": batch, **extra},
    }
