"""Checkpoints on disk: written atomically, the one before kept, and read without running pickled code."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.errors import TrainingError, UsageError


def previous(path: Path) -> Path:
    """Where the checkpoint before the newest one is kept."""
    return path.with_name(f"{path.name}.prev")


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write it so that a whole checkpoint always stands under its name; ``TrainingError`` when the disk refuses."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(dict(content), file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            _keep(path)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise TrainingError(f"cannot save {path}: {error}; the checkpoint before it is untouched") from error


def _keep(path: Path) -> None:
    """Give the newest checkpoint its second name before its own is taken over."""
    link = path.with_name(f"{path.name}.link")
    link.unlink(missing_ok=True)
    os.link(path, link)
    os.replace(link, previous(path))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> dict[str, Any]:
    """The checkpoint in that file; ``UsageError`` when it is missing, broken or would run code."""
    if not path.is_file():
        raise UsageError(f"no checkpoint {path}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UsageError(f"{path} is not a checkpoint of tensors and plain values, and loading runs no code") from None
    except (RuntimeError, EOFError, KeyError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path} ({path.stat().st_size} bytes) is not a whole checkpoint: {reason}") from None
    if not isinstance(content, dict) or not all(isinstance(content.get(k), dict) for k in ("model_state", "config")):
        raise UsageError(f"{path} is no checkpoint: it has to hold the dictionaries model_state and config")
    return content


def newest(path: Path) -> tuple[dict[str, Any], Path] | None:
    """The checkpoint under that name, else the one before it, with the file it came from; None when there is neither.

    Raises ``UsageError`` when there are files but none can be read: a run never starts over in silence.
    """
    candidates = [each for each in (path, previous(path)) if each.exists()]
    reasons = []
    for candidate in candidates:
        try:
            return read(candidate), candidate
        except UsageError as error:
            reasons.append(str(error))
    if not candidates:
        return None
    raise UsageError(f"no readable checkpoint: {'; '.join(reasons)}; restore one, or move them away to start over")


def portable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the CPU for ``torch.save``: tied names stay tied, views are cut out of their larger storages."""
    found: dict[tuple[int, torch.Size], torch.Tensor] = {}
    copies = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in found or not tensor.numel():
            local = tensor.detach().cpu()
            found[key] = local if local.untyped_storage().nbytes() == local.nbytes else local.clone()
        copies[name] = found[key]
    return copies
