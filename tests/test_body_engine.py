"""The engine: its carry and refusals, chosen operators, float32 islands under autocast, a fresh 1B's balance."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
import torch

import registry
from fractus.carry import to_compact, to_full
from fractus.continuous_engine import ContinuousThoughtEngine
from fractus.core import clock
from fractus.kuramoto import start_phases
from fractus.nn.moe import PhaseRoutedMoE
from fractus.operators.attention import attention, looped
from fractus.operators.block import block, plain

SIZES_1B = {
    "vocab_size": 50257,
    "d_model": 1280,
    "n_heads": 20,
    "d_head": 64,
    "n_levels": 2,
    "n_oscillators": 16,
    "coupling_rank": 8,
    "n_experts": 128,
    "top_k": 2,
    "expert_d_ff": 2048,
    "siren_rank": 64,
    "n_layers": 16,
}
TINY = {
    "vocab_size": 31,
    "d_model": 12,
    "n_layers": 2,
    "n_heads": 3,
    "d_head": 4,
    "n_oscillators": 5,
    "coupling_rank": 2,
    "n_experts": 6,
    "expert_d_ff": 7,
    "siren_rank": 3,
}


def tiny(seed: int = 0, batch: int = 2) -> ContinuousThoughtEngine:
    """A small float64 engine away from the wrap: gains and biases of the norms are not 1 and 0."""
    torch.manual_seed(seed)
    engine = ContinuousThoughtEngine(**TINY).double()
    with torch.no_grad():
        for name, parameter in engine.named_parameters():
            if ".norm_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    engine.reset_thought(batch)
    return engine


def test_state_dict_of_the_1b_engine_is_the_recorded_one() -> None:
    recorded = json.loads((Path(__file__).parent / "golden" / "state_dict_1b.json").read_text())
    with torch.device("meta"):
        engine = ContinuousThoughtEngine(**SIZES_1B)
    parameters = {name for name, _ in engine.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in engine.named_buffers()}
    actual = [
        {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "kind": "parameter" if name in parameters else "buffer" if name in buffers else "neither",
        }
        for name, tensor in engine.state_dict().items()
    ]
    assert len(actual) == 440
    assert actual == recorded
    assert buffers == {entry["name"] for entry in recorded if entry["kind"] == "buffer"}
    assert sum(parameter.numel() for parameter in engine.parameters()) == 1_048_631_458
    assert engine.output_head.weight is engine.observe.weight


def test_attention_state_is_block_diagonal_outwards_and_compact_inside() -> None:
    engine = tiny()
    engine.tick_chunk(torch.randint(31, (2, 5)))
    held = engine.blocks[0].compact_S
    full = engine.blocks[0].attn_S
    assert held.shape == (2, 3, 4, 4)
    assert full.shape == (2, 12, 12)
    expected = torch.stack([torch.block_diag(*row) for row in held])
    assert torch.equal(full, expected)
    assert torch.equal(to_compact(full, 3), held)
    engine.blocks[1].attn_S = full
    assert torch.equal(engine.blocks[1].attn_S, full)
    assert torch.equal(to_full(held), engine.state_dict()["blocks.0.attn_S"])
    spoiled = full.clone()
    spoiled[0, 0, 11] = 1.0
    with pytest.raises(ValueError, match="block diagonal"):
        engine.blocks[0].attn_S = spoiled


def test_a_state_dict_round_trip_keeps_the_carry() -> None:
    engine, other = tiny(0), tiny(1)
    tokens = torch.randint(31, (2, 5))
    engine.tick_chunk(tokens)
    other.reset_thought(2)
    with pytest.raises(RuntimeError, match="kuramoto_phases"):
        other.load_state_dict(engine.state_dict())
    other.tick_chunk(tokens)
    other.load_state_dict(engine.state_dict())
    assert torch.equal(other.tick_chunk(tokens), engine.tick_chunk(tokens))
    damaged = {name: value for name, value in engine.state_dict().items() if name != "blocks.0.attn_S"}
    with pytest.raises(RuntimeError, match=r"blocks\.0\.attn_S"):
        other.load_state_dict(damaged)


def test_another_batch_is_refused_until_reset() -> None:
    engine = tiny(batch=2)
    for call in (
        lambda: engine.tick_chunk(torch.zeros(3, 4, dtype=torch.long)),
        lambda: engine.tick(torch.zeros(3, dtype=torch.long)),
        lambda: engine.tick_chunk_train_ce(*[torch.zeros(1, 4, dtype=torch.long)] * 2),
    ):
        with pytest.raises(ValueError, match="reset_thought"):
            call()
    with pytest.raises(ValueError, match="reset_state"):
        engine.blocks[0].tick_chunk_core(torch.zeros(3, 4, 12, dtype=torch.float64))
    engine.reset_thought(3)
    assert engine.tick_chunk(torch.zeros(3, 4, dtype=torch.long)).shape == (3, 4, 31)
    with pytest.raises(ValueError, match="0"):
        engine.reset_thought(0)


def test_training_forms_agree_and_leave_the_same_carry() -> None:
    tokens, targets = torch.randint(31, (2, 6)), torch.randint(31, (2, 6))
    engines = [tiny() for _ in range(5)]
    logits, lb = engines[0].tick_chunk_train(tokens)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    ce, total, hidden = engines[1].tick_chunk_train_ce(tokens, targets, return_hidden=True, ce_chunk=5)
    torch.testing.assert_close(ce, expected)
    torch.testing.assert_close(total, lb)
    torch.testing.assert_close(hidden @ engines[1].observe.weight.T, logits)
    torch.testing.assert_close(engines[2].tick_chunk_train_last(tokens)[0], logits[:, -1])
    torch.testing.assert_close(engines[3].tick_chunk(tokens), logits)
    engines[4].tick_chunk_train(tokens, block_ckpt=True)
    assert lb.requires_grad
    assert torch.equal(engines[0].last_lb_loss, lb.detach())
    for other in engines[1:]:
        for (name, value), same in zip(engines[0].state_dict().items(), other.state_dict().values(), strict=True):
            assert torch.equal(value, same), name


def test_the_thought_enters_position_0_and_is_the_last_hidden() -> None:
    engine = tiny()
    tokens = torch.randint(31, (2, 6))
    _, _, hidden = engine.tick_chunk_train_ce(tokens, tokens, return_hidden=True)
    assert torch.equal(engine.thought_state, hidden[:, -1:].detach())
    assert not engine.thought_state.requires_grad
    seen = []
    engine.use({"block": lambda p, h, carry: (seen.append(h), block(plain, p, h, carry))[1]})
    thought = engine.thought_state.clone()
    engine.tick_chunk(tokens)
    torch.testing.assert_close(seen[0], engine.observe(tokens) + torch.cat([thought, thought.new_zeros(2, 5, 12)], 1))


def test_tick_thinks_on_without_a_token() -> None:
    engine, silent = tiny(), tiny()
    with torch.no_grad():
        silent.observe.weight[0] = 0.0
    token = torch.tensor([1, 2])
    for model in (engine, silent):
        model.tick(token)
    logits, confidence = engine.tick(None)
    assert logits.shape == (2, 31)
    assert confidence.shape == (2,)
    assert bool(((confidence > 0) & (confidence < 1)).all())
    expected = silent.tick(torch.zeros(2, dtype=torch.long))[1]
    torch.testing.assert_close(confidence, expected)
    assert engine.blocks[0].kuramoto_phases.shape == (2, 1, 5)


def test_block_checkpointing_recomputes_from_the_carry_that_came_in() -> None:
    models = [tiny(), tiny()]
    for model, block_ckpt in zip(models, (False, True), strict=True):
        generator = torch.Generator().manual_seed(5)
        for _ in range(3):
            tokens = torch.randint(31, (2, 6), generator=generator)
            ce, lb = model.tick_chunk_train_ce(tokens, tokens, block_ckpt=block_ckpt)
            (ce + lb).backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name


def test_chosen_operators_are_what_runs_and_unknown_ones_are_refused() -> None:
    engine = tiny()
    tokens = torch.randint(31, (2, 6))
    called = []

    def recorded(*arguments: torch.Tensor) -> object:
        called.append("attention")
        return attention(looped, *arguments)

    engine.use({"attention": recorded})
    engine.tick_chunk(tokens)
    assert called == ["attention"] * 2
    engine.use({})
    engine.tick_chunk(tokens)
    assert called == ["attention"] * 2
    with pytest.raises(ValueError, match="'attn'"):
        engine.use({"attn": recorded})


def test_every_variant_gives_the_engine_the_same_numbers() -> None:
    catalogue = registry.load()
    tokens, targets = torch.randint(31, (2, 64)), torch.randint(31, (2, 64))
    references = {name: catalogue.reference(name) for name in ("attention", "moe", "block", "cross_entropy")}
    expected = tiny().use(references).tick_chunk_train_ce(tokens, targets)
    for name in references:
        for variant in catalogue.of(name):
            actual = tiny().use({**references, name: catalogue.bind(variant.key)}).tick_chunk_train_ce(tokens, targets)
            torch.testing.assert_close(actual, expected, msg=lambda text, key=variant.key: f"{key}: {text}")


def test_a_fresh_1b_block_shows_the_analytic_load_balance() -> None:
    torch.manual_seed(0)
    layer = PhaseRoutedMoE(8, 128, 2, d_ff=2, expert_rank=1)
    layer.temperature = 2.5
    phases = torch.rand(64, 1, 1) * 2 * math.pi
    per_row = torch.stack([layer(torch.zeros(1, 1, 8), phase[None])[1] for phase in phases])
    total = 16 * per_row.mean().item()
    bessel = torch.special.i0(torch.tensor([3.2, 1.6], dtype=torch.float64))
    assert total == pytest.approx(16 * (bessel[0] / bessel[1] ** 2 - 1).item(), abs=6e-3)
    assert total == pytest.approx(14.026, abs=6e-3)


def test_a_fresh_engine_shows_the_production_load_balance() -> None:
    torch.manual_seed(0)
    sizes = {**TINY, "d_model": 64, "n_heads": 4, "d_head": 16, "n_layers": 16, "n_experts": 128, "n_oscillators": 16}
    engine = ContinuousThoughtEngine(**sizes)
    for block_module in engine.blocks:
        block_module.moe.temperature = 2.5
    engine.tick_chunk(torch.randint(31, (1, 8)))
    assert engine.last_lb_loss.item() == pytest.approx(14.026, abs=6e-3)


def test_the_clock_and_the_gates_stay_float32_under_autocast() -> None:
    engine = tiny().float()
    engine.reset_thought(2)
    seen = {}

    def recorded(hidden: torch.Tensor, phases: torch.Tensor, experts: registry.Bundle, *rest: float) -> object:
        seen["phases"] = phases.dtype
        return registry.load().reference("moe")(hidden, phases, experts, *rest)

    engine.use({"moe": recorded})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine.tick_chunk(torch.randint(31, (2, 6)))
        h = torch.randn(2, 6, 12) + 0.3
        layer = engine.blocks[0].kuramoto
        theta = layer(h)
        inside = clock(engine.blocks[0].operands(), h)
        gates = engine.blocks[0].moe._compute_gates(theta)
    assert seen["phases"] == torch.float32
    assert engine.blocks[0].kuramoto_phases.dtype == torch.float32
    assert torch.equal(inside, clock(engine.blocks[0].operands(), h))
    assert torch.equal(theta, layer(h))
    assert torch.equal(gates, engine.blocks[0].moe._compute_gates(theta))
    assert engine.blocks[0].compact_S.dtype == torch.float32
    assert engine.thought_state.dtype == torch.float32


def test_start_phases_are_spread_evenly_from_the_mean() -> None:
    h = torch.full((1, 1, 4), 0.3, dtype=torch.float64)
    expected = torch.tensor([(0.3 + i / 4) % 1 for i in range(4)], dtype=torch.float64) * 2 * math.pi
    torch.testing.assert_close(start_phases(h, 4)[0, 0], expected)


def test_sampling_draws_one_token_a_position() -> None:
    engine = tiny()
    tokens = torch.randint(31, (2, 6))
    _, _, hidden = engine.tick_chunk_train_ce(tokens, tokens, return_hidden=True)
    sample = functools.partial(engine.sample_tokens, hidden, 0.9)
    first, second = sample(torch.Generator().manual_seed(1)), sample(torch.Generator().manual_seed(1))
    assert first.shape == (2, 6)
    assert first.dtype == torch.int64
    assert torch.equal(first, second)
