"""Bytes: sizes spelled by people, a process tree's resident ones, and the kernel's high-water mark of a region."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import psutil  # type: ignore[import-untyped]

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
RESERVE_BYTES = 2 * 2**30
CHILDREN_EVERY_S = 0.5
_M_MMAP_THRESHOLD = -3


def parse_bytes(text: str) -> int:
    """``2GiB``, ``512MiB``, ``2e9`` or a plain number as bytes; ``ValueError`` for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][0-9]+)?)\s*([kKmMgG]?i?)[bB]?\s*", text)
    if match is None or match[2].lower() not in UNITS:
        raise ValueError(f"{text!r} is not a number of bytes such as 2GiB or 512MiB")
    number = float(match[1]) * UNITS[match[2].lower()]
    if number < 1:
        raise ValueError(f"{text!r} is less than one byte")
    return int(number)


def default_limit_bytes() -> int:
    """What is free now less 2 GiB, at least 1 GiB."""
    return max(2**30, int(psutil.virtual_memory().available) - RESERVE_BYTES)


class Resident:
    """Resident bytes of a process and everything it started; whom it started is looked up twice a second only.

    Looking reads every process of the system, which a measurement on few cores would feel.
    """

    def __init__(self, process: psutil.Process) -> None:
        self.process = process
        self._children: list[psutil.Process] = []
        self._looked = -CHILDREN_EVERY_S

    def __call__(self) -> int:
        """Bytes now; 0 for what has ended."""
        total = 0
        if monotonic() - self._looked >= CHILDREN_EVERY_S:
            self._looked = monotonic()
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                self._children = self.process.children(recursive=True)
        for each in (self.process, *self._children):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += int(each.memory_info().rss)
        return total


def kill_tree(process: psutil.Process) -> None:
    """End a process and everything it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def peak_of(call: Callable[[], Any], device: str) -> int | None:
    """Peak bytes of ``call`` above the level before: the allocator's on CUDA, the kernel's on Linux, else None."""
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base_bytes = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) - base_bytes
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # large blocks go back to the system when freed
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    base_bytes = status_bytes("VmRSS")
    kept = call()
    peak = max(0, status_bytes("VmHWM") - base_bytes)
    del kept
    return peak


def status_bytes(field: str) -> int:
    """A size of this process from the kernel's status file."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")


def proportional_bytes() -> int:
    """Resident bytes of this process, a page shared by n processes counted as 1/n; 0 where the kernel does not say."""
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.is_file():
        return 0
    lines = rollup.read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
