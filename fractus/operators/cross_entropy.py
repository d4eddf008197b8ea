"""Mean cross-entropy of a linear head: the contract, the dense reference and the chunked form that keeps no logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fractus import tolerances
from fractus.contract import expect, expect_floating
from fractus.draw import integers, normal
from registry import Case, Option, operator, variant


def cases() -> tuple[Case, ...]:
    """Rows fewer and more than a chunk, one row, one class, a nearly one-hot and a huge row of logits."""
    return (
        Case(name="small", kind="small", sizes={"N": 64, "D": 16, "V": 53}),
        Case(name="several_chunks", kind="small", sizes={"N": 2304, "D": 8, "V": 19}),
        Case(name="unequal_last_chunk", kind="ragged", sizes={"N": 2051, "D": 6, "V": 31}, values="last_rows_hard"),
        Case(name="ragged_75", kind="ragged", sizes={"N": 75, "D": 7, "V": 101}, values="last_rows_hard"),
        Case(name="wide_vocabulary", kind="edge", sizes={"N": 9, "D": 3, "V": 50257}),
        Case(name="one_row", kind="edge", sizes={"N": 1, "D": 5, "V": 13}),
        Case(name="two_classes", kind="edge", sizes={"N": 67, "D": 3, "V": 2}),
        Case(name="confident", kind="extreme", sizes={"N": 65, "D": 8, "V": 40}, values="confident"),
        Case(name="large", kind="extreme", sizes={"N": 70, "D": 8, "V": 40}, values="large"),
        Case(name="real_1b", kind="real", sizes={"N": 256, "D": 1280, "V": 50257}),
    )


def draw(case: Case, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """hidden (N,D) and weight (V,D) with logits of standard deviation about 1, targets (N,) over all V ids."""
    N, D, V = case.sizes["N"], case.sizes["D"], case.sizes["V"]
    hidden = normal(generator, dtype, N, D, mean=0.3)
    weight = normal(generator, dtype, V, D, std=D**-0.5)
    targets = integers(generator, V, N)
    if case.values == "last_rows_hard":
        # A loss averaged over chunks as if they were equal shows when the short chunk's rows differ from the rest.
        hidden[-(N % 64 or 64) :] *= 6.0
    if case.values == "confident":
        hidden = weight[targets] * 40.0 * D + 0.1 * hidden
    if case.values == "large":
        hidden = hidden * 1e12
    return {"hidden": hidden, "weight": weight, "targets": targets}


@operator(
    name="cross_entropy",
    reference="dense",
    cases=cases,
    draw=draw,
    outputs=("loss",),
    properties=(
        "forward",
        "gradient",
        "determinism",
        "purity",
        "layout",
        "totality",
        "poison",
        "autocast",
        "memory",
        "identity",
    ),
    tolerance=tolerances.CROSS_ENTROPY,
    differentiable=("hidden", "weight"),
    ranges={"N": (1, 200), "D": (1, 24), "V": (2, 300)},
)
def cross_entropy(arithmetic: Callable[..., Tensor], hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """``mean_n(logsumexp(h_n W^T) - (h_n W^T)[target_n])`` over all rows.

    hidden (N,D), weight (V,D) of one floating dtype, targets (N,) int64 in 0..V-1 -> () in the dtype of hidden.
    ``ValueError`` names a wrong shape, dtype or device, and on the CPU a target out of range (elsewhere looking would
    wait for the device, whose own assertion catches all but -100).
    """
    expect_floating("hidden", hidden, "N,D")
    expect_floating("weight", weight, "V,D")
    expect("weight", weight, (weight.shape[0], hidden.shape[1]), hidden.dtype, hidden.device)
    expect("targets", targets, (hidden.shape[0],), torch.int64, hidden.device)
    if targets.device.type == "cpu":
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= weight.shape[0]:
            raise ValueError(f"targets must lie in 0..{weight.shape[0] - 1}, not {low}..{high}")
    return arithmetic(hidden, weight, targets)


def summed_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of the rows' cross-entropies, in the dtype of hidden also under autocast: (N,D), (V,D), (N,) -> ()."""
    logits = (hidden @ weight.T).to(hidden.dtype)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")


@variant(operator="cross_entropy", name="dense")
def dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Reference: all logits (N,V) at once."""
    return summed_loss(hidden, weight, targets) / hidden.shape[0]


def chunked_bytes(sizes: dict[str, int], itemsize: int, ce_chunk: int = 2048) -> int:
    """Peak bytes of ``chunked`` forward: the logits of one chunk and their log-softmax, whatever N is."""
    return itemsize * 3 * min(ce_chunk, sizes["N"]) * sizes["V"]


@variant(
    operator="cross_entropy",
    name="chunked",
    options={"ce_chunk": Option(default=2048, low=64, high=8192)},
    memory_bound=chunked_bytes,
)
def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, *, ce_chunk: int = 2048) -> Tensor:
    """Rows in chunks under activation checkpointing: the logits of one chunk at a time, recomputed in backward."""
    total = hidden.new_zeros(())
    for rows, ids in zip(hidden.split(ce_chunk), targets.split(ce_chunk), strict=True):
        # Nothing random inside: saving and restoring the generators' states would only cost.
        total = total + checkpoint(summed_loss, rows, weight, ids, use_reentrant=False, preserve_rng_state=False)
    return total / hidden.shape[0]
