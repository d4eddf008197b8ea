"""Floors: the machine's measured matmul and copy rates, and the least operations and bytes of each operator."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch

Sizes = Mapping[str, int]
ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16_autocast": 4}
SIDE = {"cpu": 1536, "cuda": 8192}
COPY_BYTES = {"cpu": 256 * 2**20, "cuda": 2**30}


def machine_rates(device: str, repeats: int = 7) -> dict[str, Any]:
    """Operations a second of a square matmul by dtype, and bytes a second read and written by a copy: best of some."""
    kind = device.partition(":")[0]
    rates: dict[str, Any] = {"device": device, "threads": torch.get_num_threads()}
    for name in ("float32", "float64", "bfloat16"):
        dtype = getattr(torch, name)
        side = SIDE[kind] // (4 if kind == "cpu" and name == "bfloat16" else 1)
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        rates[f"matmul_{name}_operations_per_s"] = 2 * side**3 / _best_s(lambda a=a, b=b: a @ b, repeats, kind)  # type: ignore[misc]
    source = torch.zeros(COPY_BYTES[kind] // 4, device=device)
    target = torch.empty_like(source)
    rates["copy_bytes_per_s"] = 2 * source.nbytes / _best_s(lambda: target.copy_(source), repeats, kind)
    return rates


def _best_s(call: Callable[[], Any], repeats: int, kind: str) -> float:
    times = []
    for _ in range(repeats + 1):
        began = perf_counter()
        call()
        if kind == "cuda":
            torch.cuda.synchronize()
        times.append(perf_counter() - began)
    best = sorted(times[1:])[: max(1, repeats // 2)]
    return statistics.median(best)


def floor_s(operator: str, sizes: Sizes, mode: str, dtype: str, rates: Mapping[str, Any] | None) -> float | None:
    """``max(operations / matmul rate, bytes / copy rate)``, None where the operator has no formula.

    Backward takes twice the operations of forward and reads and writes three times its bytes.
    """
    if operator not in LEAST or not rates:
        return None
    operations, elements = LEAST[operator](sizes)
    factor, times = (3, 3) if mode == "forward_backward" else (1, 1)
    rate = rates[f"matmul_{'bfloat16' if dtype == 'bfloat16_autocast' else dtype}_operations_per_s"]
    moved_bytes = elements * (1 if operator == "data_fetch" else ITEMSIZE[dtype])
    return float(max(factor * operations / rate, times * moved_bytes / rates["copy_bytes_per_s"]))


def attention(s: Sizes) -> tuple[int, int]:
    """The recurrence: k v^T and q S for every token; q, k, v, y and the state in and out."""
    G, C, K = s["G"], s["C"], s["K"]
    return 4 * G * C * K * K, 4 * G * C * K + 2 * G * K * (K + 1)


def head(s: Sizes) -> tuple[int, int]:
    """One product with the head; its weight and the hidden rows read."""
    N, D, V = s["N"], s["D"], s["V"]
    return 2 * N * D * V, N * D + V * D


def moe(s: Sizes) -> tuple[int, int]:
    """The chosen experts on every token; their weights read once, hidden in and out."""
    B, C, D, E, F, r, k = (s[name] for name in ("B", "C", "D", "E", "F", "r", "k"))
    one = 2 * r * (D + F) if r else 2 * D * F
    return 2 * B * C * k * one, min(E, B * k) * one + 2 * B * C * D


def block(s: Sizes) -> tuple[int, int]:
    """Four projections, attention over B*levels*H groups, the experts; weights and hidden once."""
    B, C, D = s["B"], s["C"], s["H"] * s["K"]
    parts = [attention({"G": B * s["levels"] * s["H"], "C": C, "K": s["K"]}), moe({**s, "D": D})]
    return 8 * B * C * D * D + sum(p[0] for p in parts), 4 * D * D + sum(p[1] for p in parts)


def optimizer_step(s: Sizes) -> tuple[int, int]:
    """Gradients read for the norm; gradient, momentum and parameter read, the last two written."""
    elements = sum(s["rows"] * s["D"] if index % 2 == 0 else s["D"] for index in range(s["tensors"]))
    return 0, 6 * elements


def data_fetch(s: Sizes) -> tuple[int, int]:
    """Bytes: 4 read and 16 written a token."""
    return 0, 20 * s["B"] * s["T"]


LEAST: dict[str, Callable[[Sizes], tuple[int, int]]] = {
    "attention": attention,
    "cross_entropy": head,
    "sampler": head,
    "moe": moe,
    "block": block,
    "optimizer_step": optimizer_step,
    "data_fetch": data_fetch,
}
