"""What a variant must leave as it found it: a snapshot of the process's global state."""

from __future__ import annotations

import builtins
import hashlib
import math
import os
import random
import signal
import threading
import time
from types import ModuleType
from typing import Any

import numpy as np
import torch

_PATCHABLE: tuple[ModuleType | type, ...] = (
    torch, torch.nn.functional, torch.Tensor, torch.autograd, torch.testing, torch.utils.checkpoint, torch.random,
    torch.cuda, time, math, builtins, np, np.testing, os, random,
)  # fmt: skip


def names() -> dict[str, int]:
    """The identity of every attribute of the modules that a comparison or a timer relies on."""
    found = {}
    for owner in _PATCHABLE:
        label = getattr(owner, "__name__", "")
        for name, value in list(vars(owner).items()):
            if callable(value) and not name.startswith("__warningregistry"):
                found[f"{label}.{name}"] = id(value)
    return found


def snapshot() -> dict[str, Any]:
    """Settings, random streams, threads, open files and environment, by name."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "anomaly mode": torch.is_anomaly_enabled(),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "threads setting": torch.get_num_threads(),
        "interop threads setting": torch.get_num_interop_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "TF32": (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.fp32_precision),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "flush denormals": float(torch.tensor(1e-310, dtype=torch.float64) * 1.0) != 0.0,
        "torch random stream": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "python random stream": hash(random.getstate()),
        "numpy random stream": hashlib.sha256(repr(np.random.get_state()).encode()).hexdigest(),
        "cuda random streams": _cuda_streams(),
        "python threads": sorted(t.name for t in threading.enumerate()),
        "native threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
        "child processes": _children(),
        "open files": _open_files(),
        "environment variables": hashlib.sha256(repr(sorted(os.environ.items())).encode()).hexdigest(),
        "working directory": os.getcwd(),
        "signal handlers": [repr(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
    }


def _cuda_streams() -> list[str]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [hashlib.sha256(state.cpu().numpy().tobytes()).hexdigest() for state in torch.cuda.get_rng_state_all()]


def _children() -> list[str]:
    path = f"/proc/self/task/{os.getpid()}/children"
    if not os.path.exists(path):
        return []
    with open(path, encoding="ascii") as file:
        return file.read().split()


def _open_files() -> list[str]:
    found = []
    for entry in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            found.append(f"{entry}->{os.readlink(f'/proc/self/fd/{entry}')}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return sorted(found)


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names whose value differs, with both values where they are short."""
    found = []
    for name, value in before.items():
        other = after.get(name)
        if value != other:
            readable = len(f"{value}{other}") < 80
            found.append(f"{name} ({value} -> {other})" if readable else name)
    return found + [f"{name} (new)" for name in after if name not in before]
