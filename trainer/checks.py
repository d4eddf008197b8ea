"""What a run is refused for: names, devices, places, architectures and shards that do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

import registry
from trainer import shards
from trainer.configuration import RunConfiguration
from trainer.errors import UsageError
from trainer.sizes import EngineSizes


@dataclass
class Progress:
    """Where a run stands: steps done, the shard's next token, the moving averages."""

    step: int = 0
    token: int = 0
    ema_tf: float | None = None
    ema_ss: float | None = None


def find_device(configuration: RunConfiguration) -> torch.device:
    """The device that was asked for, or CUDA when it is there; ``UsageError`` when it is not."""
    name = configuration.device
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and configuration.gpu_id is not None and torch.cuda.device_count() > configuration.gpu_id:
        # Launch scripts give each worker its card by CUDA_VISIBLE_DEVICES: only cuda:0 is visible, GPU_ID a label.
        name = f"cuda:{configuration.gpu_id}" if torch.cuda.device_count() > 1 else "cuda:0"
    try:
        registry.device_class(name)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return torch.device(name)


def dtype_name(configuration: RunConfiguration, device: torch.device) -> str:
    """The dtype that was asked for, or production's: autocast on CUDA, float32 elsewhere."""
    return configuration.dtype or ("bfloat16_autocast" if device.type == "cuda" else "float32")


def resolve(configuration: RunConfiguration, device: torch.device) -> registry.Resolved:
    """The recipe's callables; ``UsageError`` for an unknown name or a variant that is not proven here."""
    try:
        ledger = registry.Ledger(configuration.ledger) if configuration.ledger else None
        recipe = registry.load_recipe(configuration.recipe_spec)
        return registry.resolve(recipe, device, dtype_name(configuration, device), ledger=ledger)
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_places(configuration: RunConfiguration) -> None:
    """Raise ``UsageError`` where the output folders cannot be made."""
    for folder in (configuration.folder, configuration.checkpoint.parent):
        nearest = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
        if not nearest.is_dir():
            raise UsageError(f"{nearest} is a file, and --out needs a folder there")


def file_stamp(path: Path) -> tuple[int, int] | None:
    """What changes when the file is replaced."""
    if not path.exists():
        return None
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns


def batches_left(configuration: RunConfiguration, shard: shards.Tokens, progress: Progress) -> int:
    """Whole batches from the next token on that the run is still to read."""
    left = max(0, (shard.size - 1 - progress.token) // configuration.batch_tokens)
    if configuration.steps is None:
        return left
    return min(left, max(0, configuration.steps - progress.step) * configuration.accum)


def check_range(
    configuration: RunConfiguration, shard: shards.Tokens, progress: Progress, sizes: EngineSizes, *, resumed: bool
) -> None:
    """Raise ``UsageError`` when the shard holds no batch or a token that will be read is not of the vocabulary."""
    least = progress.token + configuration.batch_tokens + 1
    if shard.size < least and not resumed:
        raise UsageError(
            f"shard {configuration.shard} has {shard.size} tokens; one step from token {progress.token} with "
            f"BATCH={configuration.batch} and SEQ={configuration.seq} needs at least {least}"
        )
    batches = batches_left(configuration, shard, progress)
    if batches:
        stop = progress.token + batches * configuration.batch_tokens + 1
        shards.check_ids(configuration.shard, shard, progress.token, stop, sizes.vocab_size)
