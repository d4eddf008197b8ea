"""A recipe's own proof: the whole engine built from it against the engine built from the reference recipe.

Four consecutive chunks with an update after each: losses, every parameter's gradient, the carry and the weights,
and the expert ids first. The weights are away from the discontinuities that fresh ones sit on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fractus import tolerances
from fractus.continuous_engine import ContinuousThoughtEngine
from fractus.routing import chosen_experts, gate_gap, gates
from proofs.budget import EPS, Truth, measure
from proofs.judge import MARGIN
from proofs.worker import Rejection
from registry import Catalogue, Proof, Recipe, load_recipe
from registry.ledger import ENGINE, RECIPE
from registry.static import enumerate_static

SIZES = {
    "vocab_size": 331, "d_model": 48, "n_layers": 3, "n_heads": 3, "d_head": 16, "n_levels": 2, "n_oscillators": 8,
    "coupling_rank": 4, "n_experts": 12, "top_k": 2, "expert_d_ff": 40, "siren_rank": 8,
}  # fmt: skip
BATCH, LENGTH, CHUNKS = 2, 128, 4
TEMPERATURE, LR, MOMENTUM, CLIP, LB_COEF = 2.5, 7e-4, 0.9, 1.0, 0.02
Operators = Mapping[str, Callable[..., Any]]


class Routes:
    """A moe callable that notes which experts each call chose, and how far the choice was from another."""

    def __init__(self, moe: Callable[..., Any]) -> None:
        self.moe = moe
        self.ids: list[torch.Tensor] = []
        self.margins: list[float] = []

    def __call__(
        self, hidden: torch.Tensor, phases: torch.Tensor, experts: Any, top_k: int, concentration: float
    ) -> Any:
        with torch.no_grad():
            self.ids.append(
                chosen_experts(gates(phases, experts["expert_phases"], concentration), top_k)[1].sort(-1).values[:, -1]
            )
            self.margins.append(gate_gap(phases, experts["expert_phases"], concentration, top_k))
        return self.moe(hidden, phases, experts, top_k, concentration)


@dataclass
class Trace:
    """What an engine gave over the chunks: named arrays, expert ids and the smallest margin of a routing decision."""

    arrays: dict[str, torch.Tensor] = field(default_factory=dict)
    ids: list[torch.Tensor] = field(default_factory=list)
    margin: float = 1.0


def weights(seed: int) -> dict[str, torch.Tensor]:
    """A state dict away from the ill-conditioned fresh one: gains, biases, scales and level weights perturbed."""
    torch_state = torch.get_rng_state()
    torch.manual_seed(seed)
    engine = ContinuousThoughtEngine(**SIZES)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in engine.named_parameters():
        spread = {"observe.weight": 0.2}.get(name, 0.1)
        noise = torch.randn(parameter.shape, generator=generator) * spread
        fixed = any(part in name for part in ("norm_", "b_qkv", "b_out", "b1", "b2", "scale", "level_logits"))
        if name == "observe.weight":
            parameter.data.copy_(noise)
        elif fixed:
            parameter.data.add_(noise)
    engine.reset_thought(BATCH)
    torch.set_rng_state(torch_state)
    return {name: value.clone() for name, value in engine.state_dict().items()}


def trace(
    state: Mapping[str, torch.Tensor], operators: Operators, dtype: torch.dtype, device: str, tokens: torch.Tensor
) -> Trace:
    """Train an engine of these operators for four chunks from a state; every number that it gives."""
    routes = Routes(operators["moe"])
    engine = ContinuousThoughtEngine(**SIZES).to(device=device, dtype=dtype)
    engine.reset_thought(BATCH)
    engine.load_state_dict(
        {name: value.to(dtype) if value.dtype.is_floating_point else value for name, value in state.items()}
    )
    engine.use({**operators, "moe": routes})
    for block in engine.blocks:
        block.moe.temperature = TEMPERATURE  # type: ignore[union-attr]
    found = Trace()
    parameters = list(engine.parameters())
    momentum = [torch.zeros_like(p) for p in parameters]
    for chunk in range(CHUNKS):
        inputs, targets = operators["data_fetch"](tokens, chunk * BATCH * LENGTH, BATCH, LENGTH)
        ce, lb = engine.tick_chunk_train_ce(inputs.to(device), targets.to(device))
        engine.zero_grad(set_to_none=True)
        torch.autograd.backward(ce + LB_COEF * lb)
        found.arrays |= {f"chunk{chunk}/ce": ce.detach(), f"chunk{chunk}/lb": lb.detach()}
        found.arrays |= {
            f"chunk{chunk}/grad/{n}": p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None
        }
        found.arrays[f"chunk{chunk}/grad_norm"] = operators["optimizer_step"](parameters, momentum, LR, MOMENTUM, CLIP)
        found.arrays |= {
            f"chunk{chunk}/carry/{n}": b.clone()
            for n, b in engine.named_buffers()
            if n.endswith(("attn_S", "attn_z", "thought_state"))
        }
    found.arrays |= {f"final/{n}": p.detach().clone() for n, p in engine.named_parameters()}
    found.ids, found.margin = routes.ids, min(routes.margins)
    return found


def bound(recipe: Recipe, catalogue: Catalogue, tokens: torch.Tensor) -> dict[str, Callable[..., Any]]:
    """The recipe's callables, its data fetch already holding the prepared shard."""
    found: dict[str, Callable[..., Any]] = {
        operator: catalogue.bind(f"{operator}/{name}", **recipe.options.get(operator, {}))
        for operator, name in recipe.variants.items()
    }
    fetch = catalogue.bind(f"data_fetch/{recipe.variants['data_fetch']}")
    prepared = fetch.prepare(tokens.numpy())
    found["data_fetch"] = lambda _, start, batch, seq: fetch(prepared, start, batch, seq)
    return found


def prove(recipe: Recipe, catalogue: Catalogue, device: str, device_class: str, dtypes: list[str]) -> list[Proof]:
    """The recipe's proof at each dtype."""
    static = enumerate_static()
    proofs = []
    for dtype in dtypes:
        started = time.perf_counter()
        numbers: dict[str, Any] = {"worst_error": 0.0, "budget_used": 0.0, "where": "", "checks": 0, "redrawn": 0}
        status, message = "passed", ""
        try:
            _compare(recipe, catalogue, device, dtype, numbers)
        except Rejection as rejection:
            status, message = rejection.status, rejection.message
            numbers.update(where=rejection.where, worst_error=rejection.error, budget_used=rejection.used)
        proofs.append(
            Proof(
                operator=RECIPE, variant=recipe.name, property=ENGINE, dtype=dtype, device_class=device_class,
                status=status, message=message,
                cases=CHUNKS, fingerprint=static.recipe_fingerprint(recipe.variants, recipe.options),
                duration_s=round(time.perf_counter() - started, 3), **numbers,
            )
        )  # fmt: skip
    return proofs


def _compare(recipe: Recipe, catalogue: Catalogue, device: str, dtype: str, numbers: dict[str, Any]) -> None:
    reference = load_recipe("reference")
    own = torch.float64 if dtype == "float64" else torch.float32
    for seed in range(50):
        tokens = torch.randint(
            SIZES["vocab_size"],
            (CHUNKS * BATCH * LENGTH + 1,),
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.int32,
        )
        state = weights(seed)
        oracle = trace(state, bound(reference, catalogue, tokens), torch.float64, device, tokens)
        if oracle.margin > MARGIN[dtype] * 10:
            break
        numbers["redrawn"] += 1
    else:
        raise AssertionError("no weights away from a routing tie")
    low = trace(state, bound(reference, catalogue, tokens), torch.float32, device, tokens)
    scale = EPS["float64"] / EPS["float32"] if dtype == "float64" else 1.0
    found = trace(state, bound(recipe, catalogue, tokens), own, device, tokens)
    _same_routes(found, oracle)
    for name, truth, actual in _pairs(oracle, found):
        error = (low.arrays[name].double() - truth).abs() * scale
        measured = measure(name, actual.cpu(), Truth(truth.cpu(), error.cpu(), (own,)), tolerances.ENGINE, dtype)
        numbers["checks"] += 1
        numbers["worst_error"] = max(numbers["worst_error"], measured.error)
        if measured.used > numbers["budget_used"]:
            numbers.update(budget_used=measured.used, where=f"{name}{list(measured.index)}, seed {seed}")
        if not measured.used <= 1:
            raise Rejection(
                "mismatch",
                f"{name}{list(measured.index)} is {measured.actual:.9g}, should be {measured.expected:.9g}: "
                f"{measured.used:.3g} times its budget",
                where=name, error=measured.error, used=measured.used,
            )  # fmt: skip


def _same_routes(found: Trace, oracle: Trace) -> None:
    for call, (ids, expected) in enumerate(zip(found.ids, oracle.ids, strict=True)):
        if not torch.equal(ids.cpu(), expected.cpu()):
            layer, chunk = call % SIZES["n_layers"], call // SIZES["n_layers"]
            raise Rejection(
                "mismatch",
                f"chunk {chunk}, block {layer} routes to experts {ids.tolist()}, the reference to {expected.tolist()}",
                where=f"chunk{chunk}",
            )


def _pairs(oracle: Trace, found: Trace) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    if set(oracle.arrays) != set(found.arrays):
        missing = sorted(set(oracle.arrays) ^ set(found.arrays))
        raise Rejection(
            "mismatch", f"gives other arrays than the reference: {', '.join(missing[:4])}", where=missing[0]
        )
    for name, truth in oracle.arrays.items():
        yield name, truth, found.arrays[name]
