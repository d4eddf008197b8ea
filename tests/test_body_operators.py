"""The operators on their own: refusals, conditions, vanishing denominators, the optimiser against torch's."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import registry
from fractus.operators import attention, block, cross_entropy, data_fetch, moe, optimizer_step, sampler
from registry import leaves

CATALOGUE = registry.load()


def drawn(name: str, case: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Any]:
    """The arguments of a named case."""
    operator = CATALOGUE.operator(name)
    found = next(c for c in operator.cases() if c.name == case)
    return operator.draw(found, torch.Generator().manual_seed(seed), dtype)


@pytest.mark.parametrize("name", sorted(CATALOGUE.operators))
def test_cases_are_a_pure_function_of_their_arguments(name: str) -> None:
    operator = CATALOGUE.operator(name)
    assert {case.kind for case in operator.cases()} == {"small", "ragged", "edge", "extreme", "real"}
    for case in (case for case in operator.cases() if case.kind != "real"):
        torch.manual_seed(1)
        first, state = drawn(name, case.name, torch.float32), torch.get_rng_state()
        torch.rand(3)
        second = drawn(name, case.name, torch.float32)
        assert tuple(first) == registry.catalogue.parameters_of(operator)
        for (leaf, a), (_, b) in zip(leaves(first), leaves(second), strict=True):
            if isinstance(a, torch.Tensor):
                assert torch.equal(a, b), leaf
                assert not a.is_floating_point() or a.dtype == torch.float32, leaf
        torch.manual_seed(1)
        assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", sorted(CATALOGUE.operators))
def test_every_size_in_the_ranges_is_drawn_and_runs(name: str) -> None:
    operator, reference = CATALOGUE.operator(name), CATALOGUE.reference(name)
    first = operator.cases()[0]
    ends = itertools.product(*operator.ranges.values())
    for sizes in itertools.islice(ends, 0, None, max(1, 2 ** len(operator.ranges) // 32)):
        case = first.resized(**dict(zip(operator.ranges, sizes, strict=True)))
        arguments = list(operator.draw(case, torch.Generator().manual_seed(0), torch.float32).values())
        if reference.variant.prepare is not None:
            arguments[0] = reference.prepare(arguments[0])
        assert len(list(leaves(reference(*arguments)))) == len(operator.outputs)


def refusals() -> list[tuple[str, str, dict[str, Any], str]]:
    """(operator, case, arguments to change, what the message must hold)."""
    half = torch.zeros(3, 128, 8, dtype=torch.float16)
    return [
        ("attention", "small", {"k": torch.zeros(3, 127, 8, dtype=torch.float64)}, r"\(3, 128, 8\), not \(3, 127, 8\)"),
        ("attention", "small", {"v": half}, "torch.float64, not torch.float16"),
        (
            "attention",
            "small",
            {"carry": (torch.zeros(3, 8, 8),) * 2},
            "carry S must be torch.float64, not torch.float32",
        ),
        ("attention", "small", {"q": torch.zeros(3, 0, 8)}, "no empty axis"),
        ("cross_entropy", "small", {"targets": torch.full((64,), 53)}, r"0\.\.52, not 53\.\.53"),
        ("cross_entropy", "small", {"targets": torch.full((64,), -100)}, "-100"),
        ("cross_entropy", "small", {"targets": torch.zeros(64, dtype=torch.int32)}, "torch.int64, not torch.int32"),
        ("cross_entropy", "small", {"weight": torch.zeros(53, 15, dtype=torch.float64)}, r"\(53, 16\), not \(53, 15\)"),
        ("moe", "small", {"phases": torch.zeros(2, 3, 5, dtype=torch.float64)}, "1 or 6 positions"),
        ("moe", "small", {"phases": torch.zeros(2, 1, 5)}, "torch.float64, not torch.float32"),
        ("moe", "small", {"top_k": 7}, "1..6, not 7"),
        ("moe", "small", {"concentration": 0.0}, "not 0.0"),
        ("moe", "small", {"experts": registry.Bundle({"w1": torch.zeros(1)})}, "experts must be"),
        ("block", "small", {"h": torch.zeros(2, 8, 9, dtype=torch.float64)}, "n_heads=2"),
        ("block", "small", {"h": torch.zeros(3, 8, 8, dtype=torch.float64)}, r"\(3, 2, 4, 4\), not \(2, 2, 4, 4\)"),
        ("block", "small", {"h": torch.zeros(2, 8, 8)}, "torch.float32, not torch.float64"),
        ("sampler", "small", {"temperature": 0.0}, "not 0.0"),
        ("sampler", "small", {"weight": torch.zeros(11, 8)}, "torch.float64, not torch.float32"),
        ("data_fetch", "small", {"start": -1}, "-1"),
        ("data_fetch", "small", {"start": 176}, "200 tokens does not hold the window 176..201"),
        ("data_fetch", "small", {"shard": torch.zeros(200, dtype=torch.int16)}, "int16"),
        ("data_fetch", "small", {"shard": torch.zeros(20, 10, dtype=torch.int32)}, r"\(20, 10\)"),
        ("optimizer_step", "small", {"state": ()}, "4 buffers, one a parameter, not 0"),
        ("optimizer_step", "small", {"max_norm": 0.0}, "0.0"),
    ]


@pytest.mark.parametrize(("name", "case", "changes", "message"), refusals())
def test_contract_names_what_was_asked_and_given(name: str, case: str, changes: dict[str, Any], message: str) -> None:
    arguments = {**drawn(name, case), **changes}
    with pytest.raises(ValueError, match=message):
        CATALOGUE.reference(name)(*arguments.values())


def test_no_carry_is_a_zero_carry() -> None:
    q, k, v, (S, z) = drawn("attention", "small").values()
    zeros = (torch.zeros_like(S), torch.zeros_like(z))
    expected = attention.attention(attention.einsum, q, k, v, zeros)
    for (_, a), (_, b) in zip(leaves(attention.attention(attention.einsum, q, k, v)), leaves(expected), strict=True):
        assert torch.equal(a, b)
    parameters, h, _ = drawn("block", "zero_carry").values()
    outputs = block.block(block.plain, parameters, h)
    for (_, a), (_, b) in zip(
        leaves(outputs), leaves(block.block(block.plain, parameters, h, outputs[2])), strict=True
    ):
        assert a.shape == b.shape


def test_row_batched_claims_only_routing_that_one_storage_makes_constant() -> None:
    bound = CATALOGUE.bind("moe/row_batched")
    arguments = drawn("moe", "repeated")
    expected = CATALOGUE.reference("moe")(*arguments.values())
    torch.testing.assert_close(bound(*arguments.values()), expected)
    copied = {**arguments, "phases": arguments["phases"].contiguous()}
    with pytest.raises(ValueError, match="row_constant_routing"):
        bound(*copied.values())
    varying = list(drawn("moe", "varying").values())
    assert not torch.allclose(moe.row_batched(*varying)[0], CATALOGUE.reference("moe")(*varying)[0])


@pytest.mark.parametrize("name", ["small", "repeated", "dense_experts"])
def test_row_batched_gives_each_position_of_the_phases_its_gradient(name: str) -> None:
    arguments = drawn("moe", name)
    phases = arguments["phases"].requires_grad_()
    gradients = []
    for variant in ("gather", "row_batched"):
        out, balance = CATALOGUE.bind(f"moe/{variant}")(*arguments.values())
        weights = torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin()
        gradients += torch.autograd.grad((out * weights).sum() + balance, [phases])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("case", ["zero_denominator", "threshold", "tiny_denominator", "large"])
@pytest.mark.parametrize("variant", CATALOGUE.of("attention"), ids=lambda v: v.name)
def test_attention_gradients_are_finite_at_vanishing_and_large_denominators(
    variant: registry.Variant, case: str
) -> None:
    arguments = drawn("attention", case, torch.float32)
    inputs = [arguments[n].requires_grad_() for n in "qkv"] + [t.requires_grad_() for t in arguments["carry"]]
    y, (S, z) = CATALOGUE.bind(variant.key)(*arguments.values())
    denominator = (inputs[0] * (inputs[4].unsqueeze(1) + inputs[1].cumsum(1))).sum(-1)
    assert bool((y[denominator.abs() <= 1e-10] == 0).all())
    for gradient in torch.autograd.grad((y.sum(), S.mean(), z.mean()), inputs):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("variant", CATALOGUE.of("attention"), ids=lambda v: v.name)
def test_attention_carries_a_nan_on(variant: registry.Variant) -> None:
    for name, t in (("q", 70), ("k", 70), ("v", 70)):
        arguments = drawn("attention", "small")
        arguments[name][0, t, 3] = float("nan")
        y, (S, z) = CATALOGUE.bind(variant.key)(*arguments.values())
        if name == "q":
            assert y[0, t].isnan().all()
            assert y[0, t + 1 :].isfinite().all()
        elif name == "k":
            assert y[0, t:].isnan().all()
            assert S[0, 3].isnan().all()
            assert z[0, 3].isnan()
        else:
            assert y[0, t:, 3].isnan().all()
            assert S[0, :, 3].isnan().all()
            assert y[0, :, 2].isfinite().all()
        assert y[1:].isfinite().all()
        assert S[1:].isfinite().all()


@pytest.mark.parametrize(
    "key", ["attention/cumsum", "attention/chunked", "moe/dense", "moe/row_batched", "block/checkpointed"]
)
def test_second_derivatives_are_the_references(key: str) -> None:
    operator = CATALOGUE.operator(key.partition("/")[0])
    case = "zero_carry" if operator.name == "attention" else "small"
    results = []
    for bound in (CATALOGUE.reference(operator.name), CATALOGUE.bind(key)):
        arguments = drawn(operator.name, case)
        named = {"attention": "q", "moe": "hidden", "block": "h"}[operator.name]
        x = arguments[named].requires_grad_()
        output = next(iter(bound(*arguments.values())))
        (first,) = torch.autograd.grad((output**2).sum(), [x], create_graph=True)
        results += torch.autograd.grad((first**2).sum(), [x])
    torch.testing.assert_close(results[1], results[0])


def test_chunked_loss_weighs_every_row_alike() -> None:
    for case in ("unequal_last_chunk", "ragged_75"):
        arguments = drawn("cross_entropy", case).values()
        expected = cross_entropy.dense(*arguments)
        for ce_chunk in (64, 2048):
            torch.testing.assert_close(cross_entropy.chunked(*arguments, ce_chunk=ce_chunk), expected)


@pytest.mark.parametrize("variant", ["dense", "chunked"])
def test_samples_follow_their_probabilities(variant: str) -> None:
    hidden = torch.randn(1, 4, generator=torch.Generator().manual_seed(0)).expand(20000, 4)
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    tokens = CATALOGUE.bind(f"sampler/{variant}")(hidden, weight, 0.9, torch.Generator().manual_seed(2))
    expected = sampler.probabilities(hidden[:1], weight, 0.9)[0] * len(tokens)
    chi_squared = ((torch.bincount(tokens, minlength=6) - expected) ** 2 / expected).sum()
    assert chi_squared < 30, f"chi squared {chi_squared:.1f} of 5 degrees of freedom"


@pytest.mark.parametrize("variant", ["upcast", "memmap"])
@pytest.mark.parametrize("mapped", [False, True])
def test_fetch_shifts_targets_by_one_and_shares_nothing(variant: str, mapped: bool, tmp_path: Any) -> None:
    array = np.arange(70000, 70100, dtype=np.int32)
    if mapped:
        np.save(tmp_path / "shard.npy", array)
        array = np.load(tmp_path / "shard.npy", mmap_mode="r")
    bound = CATALOGUE.bind(f"data_fetch/{variant}")
    shard = bound.prepare(array)
    inputs, targets = bound(shard, 5, 3, 7)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs, torch.arange(70005, 70026).view(3, 7))
    assert torch.equal(targets, inputs + 1)
    inputs.zero_()
    assert torch.equal(bound(shard, 5, 3, 7)[0], targets - 1)
    assert bound(shard, 99 - 21, 3, 7)[1][-1, -1] == 70099
    with pytest.raises(ValueError, match="does not hold"):
        bound(shard, 99 - 20, 3, 7)


def torch_steps(parameters: list[torch.nn.Parameter], gradients: list[list[torch.Tensor | None]]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(parameters, lr=7e-4, momentum=0.9)
    norms = []
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        optimizer.step()
    return norms


def test_optimizer_step_is_clip_and_sgd_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (4,), (2, 2), (3,)]
    own = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    theirs = [torch.nn.Parameter(value.clone()) for value in own]
    gradients: list[list[torch.Tensor | None]] = []
    for step, scale in enumerate((10.0, 1e-3, 1.0, 0.0)):
        drawn_now = [torch.randn(shape, generator=generator, dtype=torch.float64) * scale for shape in shapes]
        gradients.append([*drawn_now[:3], None if step % 2 else drawn_now[3]])
    norms = torch_steps(theirs, gradients)
    state = [torch.zeros_like(value) for value in own]
    tied = [*own, own[0]]
    for step, expected in zip(gradients, norms, strict=True):
        for index, gradient in enumerate(step):
            own[index].grad = None if gradient is None else gradient.clone()
        own[0].grad = own[0].grad.to_sparse(1)
        norm = optimizer_step.optimizer_step(optimizer_step.dense, tied, [*state, state[0].clone()], 7e-4, 0.9, 1.0)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=1e-15)
    for value, expected in zip(own, theirs, strict=True):
        torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-15)


def test_optimizer_step_leaves_gradients_and_untrained_parameters_alone() -> None:
    arguments = drawn("optimizer_step", "absent")
    before = [None if p.grad is None else p.grad.clone() for p in arguments["parameters"]]
    values = [p.detach().clone() for p in arguments["parameters"]]
    momenta = [m.clone() for m in arguments["state"]]
    CATALOGUE.reference("optimizer_step")(*arguments.values())
    for p, m, gradient, value, momentum in zip(
        arguments["parameters"], arguments["state"], before, values, momenta, strict=True
    ):
        if gradient is None:
            assert torch.equal(p, value)
            assert torch.equal(m, momentum)
        else:
            assert torch.equal(p.grad, gradient)
            assert not torch.equal(p, value)
            assert not torch.equal(m, momentum)


def test_a_nan_gradient_is_not_hidden() -> None:
    arguments = drawn("optimizer_step", "small")
    arguments["parameters"][0].grad[0, 0] = float("nan")
    assert CATALOGUE.reference("optimizer_step")(*arguments.values()).isnan()
    assert all(p.isnan().all() for p in arguments["parameters"])


def test_prepare_of_the_fetches_keeps_or_copies_the_shard() -> None:
    array = np.arange(10, dtype=np.int32)
    assert data_fetch.as_array(array) is array
    assert data_fetch.upcast_prepare(array).dtype == torch.int64
    with pytest.raises(ValueError, match="int16"):
        data_fetch.as_array(array.astype(np.int16))
