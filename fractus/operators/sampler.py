"""One token a row from a tempered softmax: the contract, the dense reference and the chunked form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fractus import tolerances
from fractus.contract import expect, expect_floating
from fractus.draw import normal
from registry import Case, Option, operator, variant


def cases() -> tuple[Case, ...]:
    """Rows fewer and more than a chunk, one row, uniform and one-hot distributions, a small temperature."""
    return (
        Case(name="small", kind="small", sizes={"N": 64, "D": 8, "V": 11}),
        Case(name="several_chunks", kind="ragged", sizes={"N": 150, "D": 5, "V": 7}),
        Case(name="one_row", kind="edge", sizes={"N": 1, "D": 3, "V": 5}),
        Case(name="two_classes", kind="edge", sizes={"N": 65, "D": 3, "V": 2}),
        Case(name="uniform", kind="extreme", sizes={"N": 66, "D": 4, "V": 9}, values="uniform"),
        Case(name="one_hot", kind="extreme", sizes={"N": 66, "D": 8, "V": 9}, values="one_hot"),
        Case(name="cold", kind="extreme", sizes={"N": 66, "D": 6, "V": 9}, values="cold"),
        Case(name="real_1b", kind="real", sizes={"N": 64, "D": 1280, "V": 50257}),
    )


def draw(case: Case, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor | float | torch.Generator]:
    """hidden (N,D), weight (V,D), temperature and a generator seeded from ``generator``."""
    N, D, V = case.sizes["N"], case.sizes["D"], case.sizes["V"]
    hidden = normal(generator, dtype, N, D)
    weight = normal(generator, dtype, V, D, std=1.5 * D**-0.5)
    temperature = 0.9
    if case.values == "uniform":
        hidden = torch.zeros_like(hidden)
    if case.values == "one_hot":
        hidden = hidden * 1e6
    if case.values == "cold":
        temperature = 1e-2
    seed = int(torch.randint(2**31, (), generator=generator))
    return {
        "hidden": hidden,
        "weight": weight,
        "temperature": temperature,
        "generator": torch.Generator().manual_seed(seed),
    }


def probabilities(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """The exact distribution softmax(hidden weight^T / temperature) in float64: (N,D), (V,D) -> (N,V)."""
    return torch.softmax(hidden.double() @ weight.double().T / temperature, -1)


@operator(
    name="sampler",
    reference="dense",
    cases=cases,
    draw=draw,
    outputs=("tokens",),
    properties=("distribution", "determinism", "purity", "layout", "memory", "identity"),
    tolerance=tolerances.SAMPLER,
    slices={"tokens": (0,)},
    ranges={"N": (1, 200), "D": (1, 12), "V": (2, 40)},
    probabilities=probabilities,
)
def sampler(
    arithmetic: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    temperature: float,
    generator: torch.Generator | None,
) -> Tensor:
    """Tokens ``~ softmax(hidden weight^T / temperature)``, one a row, independent.

    hidden (N,D), weight (V,D) of one floating dtype, temperature > 0 -> (N,) int64. ``generator`` on the device of
    hidden is advanced and is the only randomness; None is the device's default one. ``ValueError`` names a wrong
    shape, dtype, device or temperature.
    """
    expect_floating("hidden", hidden, "N,D")
    expect_floating("weight", weight, "V,D")
    expect("weight", weight, (weight.shape[0], hidden.shape[1]), hidden.dtype, hidden.device)
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    if generator is not None and generator.device.type != hidden.device.type:
        raise ValueError(f"generator must be on {hidden.device}, not {generator.device}")
    return arithmetic(hidden, weight, temperature, generator)


@variant(operator="sampler", name="dense")
def dense(hidden: Tensor, weight: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Reference: all probabilities (N,V) at once, then one multinomial draw a row."""
    return drawn_rows(hidden, weight, temperature, generator)


def drawn_rows(hidden: Tensor, weight: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """One token a row from the softmax of all its logits: (N,D), (V,D) -> (N,)."""
    with torch.no_grad():
        logits = (hidden @ weight.T).to(hidden.dtype)
        # The peak is taken off before the division: a small temperature would carry it to infinity.
        tempered = (logits - logits.amax(-1, keepdim=True)) / temperature
        return torch.multinomial(torch.softmax(tempered, -1), 1, generator=generator).squeeze(-1)


def chunked_bytes(sizes: dict[str, int], itemsize: int, ce_chunk: int = 2048) -> int:
    """Peak bytes of ``chunked``: logits, tempered logits, probabilities and draws of one chunk, whatever N is."""
    return itemsize * 6 * min(ce_chunk, sizes["N"]) * sizes["V"]


@variant(
    operator="sampler",
    name="chunked",
    options={"ce_chunk": Option(default=2048, low=64, high=8192)},
    memory_bound=chunked_bytes,
)
def chunked(
    hidden: Tensor, weight: Tensor, temperature: float, generator: torch.Generator | None, *, ce_chunk: int = 2048
) -> Tensor:
    """Rows in chunks, each drawn densely: the same distribution, the generator's stream consumed chunk by chunk."""
    return torch.cat([drawn_rows(rows, weight, temperature, generator) for rows in hidden.split(ce_chunk)])
