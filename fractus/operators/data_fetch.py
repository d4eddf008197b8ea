"""One step's tokens from a flat shard: the contract, the copying reference and the mapped form."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fractus import tolerances
from fractus.draw import integers
from registry import Case, operator, variant

Shard = NDArray[np.integer] | Tensor
Window = tuple[Tensor, Tensor]


def cases() -> tuple[Case, ...]:
    """Windows at the start, inside and exactly at the end of a shard, single tokens, ids beyond 16 bits."""
    return (
        Case(name="small", kind="small", sizes={"B": 3, "T": 8, "L": 200, "start": 24}),
        Case(name="at_start", kind="small", sizes={"B": 2, "T": 16, "L": 64, "start": 0}),
        Case(name="odd", kind="ragged", sizes={"B": 3, "T": 13, "L": 301, "start": 77}),
        Case(name="one_token", kind="edge", sizes={"B": 1, "T": 1, "L": 2, "start": 0}),
        Case(name="last_window", kind="edge", sizes={"B": 2, "T": 5, "L": 31, "start": 20}),
        Case(name="wide_ids", kind="extreme", sizes={"B": 2, "T": 8, "L": 100, "start": 3}, values="wide_ids"),
        Case(name="real_1b", kind="real", sizes={"B": 8, "T": 128, "L": 4_000_000, "start": 1_248_256}),
    )


def draw(case: Case, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor | int]:
    """An int32 shard of L ids (before ``prepare``) and a window in it; sizes too long for the shard lengthen it."""
    B, T, start = case.sizes["B"], case.sizes["T"], case.sizes["start"]
    length = max(case.sizes["L"], start + B * T + 1)
    high = 2**31 - 1 if case.values == "wide_ids" else 50257
    return {"shard": integers(generator, high, length).to(torch.int32), "start": start, "batch": B, "seq": T}


@operator(
    name="data_fetch",
    reference="upcast",
    cases=cases,
    draw=draw,
    outputs=("inputs", "targets"),
    properties=("forward", "determinism", "purity", "memory", "identity"),
    tolerance=tolerances.DATA_FETCH,
    slices={"inputs": (0,), "targets": (0,)},
    ranges={"B": (1, 5), "T": (1, 40), "start": (0, 60)},
)
def data_fetch(arithmetic: Callable[..., Window], shard: Shard, start: int, batch: int, seq: int) -> Window:
    """``inputs = shard[start : start + batch*seq]``, ``targets`` the same one later, both as (batch, seq).

    shard is what the variant's ``prepare`` made of a one-dimensional int32 array (numpy, mapped or not, or a CPU
    tensor). Returns two int64 CPU tensors that share no storage with each other or the shard. ``ValueError`` names a
    wrong dtype or dimension and a window that the shard does not hold.
    """
    if not isinstance(shard, (np.ndarray, Tensor)) or len(shard.shape) != 1:
        raise ValueError(
            f"shard must be a one-dimensional array, not {type(shard).__name__} of shape {tuple(np.shape(shard))}"
        )
    if str(shard.dtype).removeprefix("torch.") not in ("int32", "int64"):
        raise ValueError(f"shard must hold int32 ids (int64 once prepared), not {shard.dtype}")
    if start < 0 or batch < 1 or seq < 1:
        raise ValueError(f"start must be >= 0, batch and seq >= 1, not {start}, {batch} and {seq}")
    if start + batch * seq + 1 > len(shard):
        end = start + batch * seq + 1
        raise ValueError(
            f"shard of {len(shard)} tokens does not hold the window {start}..{end}: batch {batch}, seq {seq}"
        )
    return arithmetic(shard, start, batch, seq)


def as_array(shard: Shard) -> NDArray[np.integer]:
    """The shard as a numpy array over the same memory, or file; ``ValueError`` unless one-dimensional int32."""
    array = shard.numpy() if isinstance(shard, Tensor) else shard
    if array.ndim != 1 or array.dtype != np.int32:
        raise ValueError(f"a shard is a one-dimensional int32 array, not {array.dtype} of shape {array.shape}")
    return array


def upcast_prepare(shard: Shard) -> Tensor:
    """The whole shard copied to an int64 tensor, 8 bytes a token, as the original did."""
    return torch.from_numpy(as_array(shard).astype(np.int64))


@variant(operator="data_fetch", name="upcast", prepare=upcast_prepare)
def upcast(shard: Tensor, start: int, batch: int, seq: int) -> Window:
    """Reference: views of the int64 copy, cloned."""
    tokens = batch * seq
    inputs = shard[start : start + tokens].view(batch, seq).clone()
    return inputs, shard[start + 1 : start + 1 + tokens].view(batch, seq).clone()


def memmap_bytes(sizes: dict[str, int], itemsize: int) -> int:
    """Peak bytes of ``memmap`` above its outputs: the pages of one window, whatever the shard's length is."""
    return 4 * (sizes["B"] * sizes["T"] + 1) + 2 * 4096


@variant(operator="data_fetch", name="memmap", prepare=as_array, memory_bound=memmap_bytes)
def memmap(shard: NDArray[np.integer], start: int, batch: int, seq: int) -> Window:
    """The int32 array as it lies, mapped or not; only the window is copied to int64."""
    tokens = batch * seq
    inputs = shard[start : start + tokens].astype(np.int64).reshape(batch, seq)
    targets = shard[start + 1 : start + 1 + tokens].astype(np.int64).reshape(batch, seq)
    return torch.from_numpy(inputs), torch.from_numpy(targets)
