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
# glibc's mallopt; a block of its own mapping has the second bit of its size field set.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _IS_MAPPED = -1, -3, 2
_MOST_KEPT_BYTES, _NEVER = 32 * 2**20, 2**31 - 1
_MAPPED_FROM_BYTES, _LARGEST_FREE_BYTES = 2**16, 2**30


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
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)  # large blocks go back to the system when freed
        libc.malloc_trim(0)
    taken = _take_free_blocks(libc)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        base_bytes = status_bytes("VmRSS")
        kept = call()
        peak = max(0, status_bytes("VmHWM") - base_bytes)
        del kept
    finally:
        for address in taken:
            libc.free(ctypes.c_void_p(address))
    return peak


def keep_freed_memory() -> None:
    """Have the heap keep freed blocks below 32 MiB for the next call; larger ones go back to the system as ever.

    glibc moves that limit with what was freed last, and trims. Whether a call then pays for page faults depends on how
    the heap came to lie: alike in all processes of a run, another way in the next. Other libraries are left alone.
    """
    libc = ctypes.CDLL(None)
    if sys.platform.startswith("linux") and hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MOST_KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def _take_free_blocks(libc: Any) -> list[int]:
    """Addresses of all free blocks large enough to be mapped, taken untouched so that no call can reuse one.

    What a call frees into the heap stays resident, and whether its next block fits there is chance: with none left
    every large block is mapped and unmapped, and the high-water mark is what the call itself holds.
    """
    taken: list[int] = []
    if not hasattr(libc, "mallopt"):
        return taken
    libc.malloc.restype = ctypes.c_void_p
    size_bytes = _LARGEST_FREE_BYTES
    while size_bytes >= _MAPPED_FROM_BYTES:
        address = libc.malloc(ctypes.c_size_t(size_bytes))
        if address is None or _is_mapped(address):
            libc.free(ctypes.c_void_p(address))
            size_bytes //= 2
        else:
            taken.append(address)
    return taken


def _is_mapped(address: int) -> bool:
    word_bytes = ctypes.sizeof(ctypes.c_size_t)
    return bool(ctypes.c_size_t.from_address(address - word_bytes).value & _IS_MAPPED)


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
