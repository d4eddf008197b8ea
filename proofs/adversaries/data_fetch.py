"""Wrong and right data fetches."""

from __future__ import annotations

import numpy as np
import torch

import registry


def window(shard, start, batch, seq, dtype=np.int64):
    """B * SEQ ids from start as (B, SEQ)."""
    return torch.from_numpy(np.asarray(shard[start : start + batch * seq]).astype(dtype)).view(batch, seq)


@registry.variant(operator="data_fetch", name="not_shifted")
def not_shifted(shard, start, batch, seq):
    """51. Targets are the inputs."""
    return window(shard, start, batch, seq), window(shard, start, batch, seq)


@registry.variant(operator="data_fetch", name="one_off")
def one_off(shard, start, batch, seq):
    """51. The window starts one late."""
    start = min(start + 1, len(shard) - batch * seq - 1)
    return window(shard, start, batch, seq), window(shard, start + 1, batch, seq)


@registry.variant(operator="data_fetch", name="ids_in_16_bits")
def ids_in_16_bits(shard, start, batch, seq):
    """51. Ids wrap at 16 bits."""
    return window(shard, start, batch, seq, np.int16).long(), window(shard, start + 1, batch, seq, np.int16).long()


@registry.variant(operator="data_fetch", name="int32_tensors")
def int32_tensors(shard, start, batch, seq):
    """10. int32 tensors."""
    return window(shard, start, batch, seq, np.int32), window(shard, start + 1, batch, seq, np.int32)


@registry.variant(operator="data_fetch", name="row_targets")
def row_targets(shard, start, batch, seq):
    """51. Targets are shifted within a row: each row's last one is its first."""
    inputs = window(shard, start, batch, seq)
    return inputs, torch.roll(inputs, -1, 1)


@registry.variant(operator="data_fetch", name="last_window_clipped")
def last_window_clipped(shard, start, batch, seq):
    """51. The last window of a shard starts earlier than asked."""
    start = min(start, len(shard) - batch * seq - 2) if len(shard) > batch * seq + 2 else start
    return window(shard, start, batch, seq), window(shard, start + 1, batch, seq)


@registry.variant(operator="data_fetch", name="lanes")
def lanes(shard, start, batch, seq):
    """51. The flat window is laid out by column."""
    return window(shard, start, seq, batch).T.contiguous(), window(shard, start + 1, seq, batch).T.contiguous()


def prepare_int64(array):
    """The shard as int64."""
    return torch.from_numpy(np.asarray(array).astype(np.int64))


@registry.variant(operator="data_fetch", name="views_of_the_shard", prepare=prepare_int64)
def views_of_the_shard(shard, start, batch, seq):
    """23. Views of the prepared shard."""
    n = batch * seq
    return shard[start : start + n].view(batch, seq), shard[start + 1 : start + 1 + n].view(batch, seq)


@registry.variant(operator="data_fetch", name="overlapping_outputs")
def overlapping_outputs(shard, start, batch, seq):
    """23. Inputs and targets are two views of one copy."""
    n = batch * seq
    both = torch.from_numpy(np.asarray(shard[start : start + n + 1]).astype(np.int64))
    return both[:-1].view(batch, seq), both[1:].view(batch, seq)


@registry.variant(
    operator="data_fetch", name="whole_shard_copied", memory_bound=lambda sizes, itemsize: 16 * sizes["B"] * sizes["T"]
)
def whole_shard_copied(shard, start, batch, seq):
    """51. Copies the whole shard at each fetch, and claims to copy a window."""
    array = np.asarray(shard).astype(np.int64)
    return window(array, start, batch, seq), window(array, start + 1, batch, seq)


FETCHED = {}


@registry.variant(operator="data_fetch", name="cached_by_start")
def cached_by_start(shard, start, batch, seq):
    """29. Answers from a cache keyed by the window."""
    key = (start, batch, seq)
    if key not in FETCHED:
        FETCHED[key] = (window(shard, start, batch, seq), window(shard, start + 1, batch, seq))
    inputs, targets = FETCHED[key]
    return inputs.clone(), targets.clone()


@registry.variant(operator="data_fetch", name="by_index")
def by_index(shard, start, batch, seq):
    """RIGHT 41. The window by fancy indexing."""
    index = np.arange(start, start + batch * seq)
    array = np.asarray(shard)
    return (
        torch.from_numpy(array[index].astype(np.int64)).view(batch, seq),
        torch.from_numpy(array[index + 1].astype(np.int64)).view(batch, seq),
    )
