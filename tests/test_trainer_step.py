"""The training step is v1's: against a plain loop with torch's own optimizer, clipping and cross-entropy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import SIZES, VOCABULARY
from torch.nn.functional import cross_entropy

import registry
from fractus.continuous_engine import ContinuousThoughtEngine
from trainer.step import Draws, Hyper, NonFiniteError, Stepper

LANES, CHUNK = 2, 8
Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def catalogue() -> registry.Catalogue:
    return registry.load()


@pytest.fixture
def engine() -> ContinuousThoughtEngine:
    torch.manual_seed(0)
    engine = ContinuousThoughtEngine(**SIZES).double()
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    engine.reset_thought(LANES)
    return engine


def greedy(hidden: torch.Tensor, weight: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    assert temperature == 0.9
    return (hidden @ weight.T).argmax(-1)


def stepper_of(
    engine: ContinuousThoughtEngine, catalogue: registry.Catalogue, sampler: Callable[..., Any] = greedy, **changed: Any
) -> Stepper:
    hyper = Hyper(**{"lr": 0.5, "ss_rate": 1.0, "ss_prob": 1.0, "lb_coef": 0.02, "seed": 0, **changed})
    optimizer_step = catalogue.reference("optimizer_step")
    parameters = dict(engine.named_parameters())
    return Stepper(
        engine=engine,
        parameters=parameters,
        sampler=sampler,
        optimizer_step=optimizer_step,
        hyper=hyper,
        device=torch.device("cpu"),
    )


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    flat = torch.randint(0, VOCABULARY, (count * LANES * CHUNK + 1,), generator=generator)
    size = LANES * CHUNK
    pieces = [flat[i * size : (i + 1) * size + 1] for i in range(count)]
    return [(piece[:-1].view(LANES, CHUNK), piece[1:].view(LANES, CHUNK)) for piece in pieces]


def plain_loss(engine: ContinuousThoughtEngine, inputs: torch.Tensor, targets: torch.Tensor, weight: float) -> Any:
    logits, balance = engine.tick_chunk_train(inputs)
    return weight * cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.02 * balance, logits


def plain_ce(logits: torch.Tensor, targets: torch.Tensor) -> float:
    return float(cross_entropy(logits.detach().flatten(0, 1), targets.flatten()))


def plain_update(engine: ContinuousThoughtEngine, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
    optimizer.step()
    return float(norm)


def test_teacher_forced_then_sampled_each_with_its_own_update(
    engine: ContinuousThoughtEngine, catalogue: registry.Catalogue
) -> None:
    plain = copy.deepcopy(engine)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    stepper = stepper_of(engine, catalogue)
    for number, (inputs, targets) in enumerate(batches(4), start=1):
        result = stepper.step(number, [(inputs, targets)])
        loss, logits = plain_loss(plain, inputs, targets, 1.0)
        samples = logits.detach().argmax(-1)
        norm = plain_update(plain, optimizer, loss)
        mixed = torch.cat([inputs[:, :1], samples[:, :-1]], 1)
        sampled_loss, sampled_logits = plain_loss(plain, mixed, targets, 0.5)
        plain_update(plain, optimizer, sampled_loss)
        assert result.grad_norm == pytest.approx(norm, rel=1e-9)
        assert result.tf == pytest.approx(plain_ce(logits, targets), rel=1e-9)
        assert result.ss == pytest.approx(plain_ce(sampled_logits, targets), rel=1e-9)
    expected, actual = plain.state_dict(), engine.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-8, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")


def test_without_sampling_there_is_one_pass(engine: ContinuousThoughtEngine, catalogue: registry.Catalogue) -> None:
    def never(*arguments: Any) -> torch.Tensor:
        raise AssertionError("sampled")

    stepper = stepper_of(engine, catalogue, never, ss_rate=0.0)
    result = stepper.step(1, batches(1))
    assert result.ss is None


def test_accumulated_batches_make_one_update_with_the_mean_gradient(
    engine: ContinuousThoughtEngine, catalogue: registry.Catalogue
) -> None:
    plain = copy.deepcopy(engine)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    result = stepper_of(engine, catalogue).step(1, batches(3))
    total = torch.zeros((), dtype=torch.float64)
    for inputs, targets in batches(3):
        loss, logits = plain_loss(plain, inputs, targets, 1.0)
        mixed = torch.cat([inputs[:, :1], logits.detach().argmax(-1)[:, :-1]], 1)
        total = total + (loss + plain_loss(plain, mixed, targets, 0.5)[0]) / 3
    assert result.grad_norm == pytest.approx(plain_update(plain, optimizer, total), rel=1e-9)
    for (name, actual), expected in zip(engine.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")


def draws(step: int, **changed: Any) -> Draws:
    hyper = Hyper(**{"lr": 1.0, "ss_rate": 0.25, "ss_prob": 0.2, "lb_coef": 0.0, "seed": 3, **changed})
    return Draws(hyper, step, 0, torch.device("cpu"))


def test_sampling_comes_at_its_rate_and_takes_its_share_of_positions() -> None:
    assert 0.22 < sum(draws(step).sampling for step in range(4000)) / 4000 < 0.28
    inputs, samples = torch.zeros(40, 50, dtype=torch.int64), torch.arange(1, 51).repeat(40, 1)
    mixed = draws(1).mix(inputs, samples)
    assert (mixed[:, 0] == 0).all()
    taken = mixed[:, 1:] != 0
    assert 0.17 < taken.double().mean() < 0.23
    assert (mixed[:, 1:][taken] == samples[:, :-1][taken]).all()


def test_draws_depend_on_seed_and_step_only() -> None:
    def drawn(step: int, seed: int = 3) -> torch.Tensor:
        return torch.rand(4, generator=draws(step, seed=seed).on_device)

    torch.rand(7)
    assert torch.equal(drawn(9), drawn(9))
    assert not torch.equal(drawn(9), drawn(10))
    assert not torch.equal(drawn(9), drawn(9, seed=4))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_loss_changes_nothing(
    engine: ContinuousThoughtEngine, catalogue: registry.Catalogue, value: float
) -> None:
    stepper = stepper_of(engine, catalogue)
    stepper.step(1, batches(2)[:1])
    with torch.no_grad():
        engine.blocks[0].attn.b_out[0] = value
    before = copy.deepcopy((engine.state_dict(), stepper.momentum))
    with pytest.raises(NonFiniteError, match="teacher-forced cross-entropy is"):
        stepper.step(2, batches(2)[1:])
    for expected, actual in zip(before, (engine.state_dict(), stepper.momentum), strict=True):
        for name in expected:
            torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0, equal_nan=True)
    assert all(parameter.grad is None for parameter in engine.parameters())


def test_a_non_finite_gradient_is_named_and_changes_nothing(
    engine: ContinuousThoughtEngine, catalogue: registry.Catalogue
) -> None:
    stepper = stepper_of(engine, catalogue)
    before = copy.deepcopy(engine.state_dict())
    engine.blocks[1].kuramoto.omega.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(NonFiniteError, match=r"gradient norm is nan \(first in blocks\.1\.kuramoto\.omega"):
        stepper.step(1, batches(1))
    assert all(torch.equal(engine.state_dict()[name], value) for name, value in before.items())


def test_a_non_finite_sampling_pass_leaves_the_teacher_forced_update(
    engine: ContinuousThoughtEngine, catalogue: registry.Catalogue
) -> None:
    twin = copy.deepcopy(engine)
    stepper_of(twin, catalogue, ss_rate=0.0).step(1, batches(1))

    def poison(*arguments: Any) -> torch.Tensor:
        engine.blocks[0].attn.w_out.register_hook(lambda gradient: gradient * float("inf"))
        return greedy(*arguments)

    with pytest.raises(NonFiniteError, match="scheduled-sampling gradient norm") as caught:
        stepper_of(engine, catalogue, poison).step(1, batches(1))
    assert caught.value.partial is not None
    for name, value in twin.state_dict().items():
        assert torch.equal(engine.state_dict()[name], value), name
