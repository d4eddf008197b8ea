"""Bytes of a cell: sizes as people spell them, and a peak that is the call's own, however the heap lies."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from benchmarks import memory
from registry.settings import ROOT

FRAGMENTED = """
import numpy as np
from benchmarks import memory

MIB = 2**20 // 8
memory.keep_freed_memory()
blocks = [np.ones(size * MIB) for size in HISTORY]
del blocks[::2]  # holes between what stays

def call():
    first, second = np.ones(8 * MIB), np.ones(8 * MIB)
    del first
    third = np.ones(12 * MIB)
    return float(second[0] + third[0])

print(round(memory.peak_of(call, "cpu") / 2**20, 1))
"""


@pytest.mark.parametrize(("text", "number"), [("2GiB", 2**31), ("512 MiB", 2**29), ("1e6", 10**6), ("3kB", 3000)])
def test_bytes_are_spelled_with_units(text: str, number: int) -> None:
    assert memory.parse_bytes(text) == number


def test_peak_is_above_what_was_there_before() -> None:
    kept = np.ones(2**22)
    peak = memory.peak_of(lambda: float(np.ones(2**22).sum()), "cpu")
    assert peak is not None
    assert 0.9 * kept.nbytes < peak < 1.5 * kept.nbytes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's high-water mark is Linux's")
@pytest.mark.parametrize("history", [[], [9, 1, 9, 1], [30, 1, 20, 1, 13, 1, 9]])
def test_peak_does_not_depend_on_the_holes_of_the_heap(history: list[int]) -> None:
    script = FRAGMENTED.replace("HISTORY", str(history))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(20.0, abs=0.3)
