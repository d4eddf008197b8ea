"""The names and signatures that existing scripts call, and what each of them computes or refuses."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from fractus.continuous_engine import ContinuousThoughtEngine, CTEBlock
from fractus.nn import attention, ce, farey, stats
from fractus.nn.moe import PhaseRoutedMoE
from fractus.nn.phase_ode import KuramotoLayer
from fractus.operators.attention import attention as attention_operator
from fractus.operators.attention import looped

FORMS = (
    attention._linear_attention_causal_vectorized,
    attention._linear_attention_causal_einsum,
    attention._linear_attention_causal_cumsum,
    attention._linear_attention_causal_chunked,
)
SIGNATURES = {
    ContinuousThoughtEngine: "vocab_size=50257, d_model=256, n_layers=1, n_heads=4, d_head=64, n_levels=2, "
    "n_oscillators=16, coupling_rank=8, n_experts=8, top_k=2, expert_d_ff=256, siren_rank=32",
    CTEBlock: "d_model, n_heads, d_head, n_levels, n_oscillators, coupling_rank, n_experts, top_k, "
    "expert_d_ff, siren_rank=32",
    attention.FractalLinearAttention: "d_model, n_heads, d_head, n_levels=3",
    PhaseRoutedMoE: "d_model, n_experts, top_k, kappa=4.0, temperature=1.0, d_ff=64, expert_rank=None",
    KuramotoLayer: "d_model, n_oscillators, rank, n_steps=4, dt=0.1, damping=0.01",
    farey.farey_sequence: "n",
    farey.expert_phases: "n_experts",
    stats.elu_plus_one: "x, alpha=1.0",
    stats.stable_softmax: "logits, dim=-1",
    ce.chunked_cross_entropy: "h, W, targets, ce_chunk",
    ce.sample_tokens_chunked: "h, W, temperature, ce_chunk, generator=None",
}


@pytest.fixture
def selected() -> Callable[[str], None]:
    """``set_attention_impl``, put back to its default afterwards."""
    yield attention.set_attention_impl
    attention.set_attention_impl("cumsum")


@pytest.mark.parametrize("target", SIGNATURES, ids=lambda target: target.__name__)
def test_signature_is_kept(target: Callable[..., object]) -> None:
    parameters = inspect.signature(target).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert ", ".join(shown) == SIGNATURES[target]


def features(seed: int, *shape: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return stats.elu_plus_one(q), stats.elu_plus_one(k), v


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("length", [1, 64, 77, 128])
def test_attention_forms_follow_the_recurrence(form: Callable[..., object], length: int) -> None:
    q, k, v = features(0, 3, length, 4)
    carry = (torch.rand(3, 4, 4, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64))
    expected, (S, z) = attention_operator(looped, q, k, v, carry)
    y, (S_form, z_form) = form(q, k, v, carry)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(S_form, S)
    torch.testing.assert_close(z_form, z)
    torch.testing.assert_close(form(q, k, v), attention._linear_attention_causal_one_head(q, k, v))


def test_one_head_takes_a_single_sequence() -> None:
    q, k, v = features(1, 5, 3)
    y = attention._linear_attention_causal_one_head(q, k, v)
    expected = torch.stack([(q[t] @ (k[: t + 1].T @ v[: t + 1])) / (q[t] @ k[: t + 1].sum(0)) for t in range(5)])
    torch.testing.assert_close(y, expected)


def test_selected_implementation_is_what_runs(selected: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = features(2, 1, 4, 2)
    called = []
    for name in ("einsum", "looped", "cumsum", "chunked"):
        original = attention.IMPLEMENTATIONS[name]
        monkeypatch.setitem(
            attention.IMPLEMENTATIONS, name, lambda *a, f=original, n=name: (called.append(n), f(*a))[1]
        )
        selected(name)
        attention._linear_attention_causal_vectorized(q, k, v)
        assert called.pop() == name
        assert not called
    with pytest.raises(ValueError, match="'flash'"):
        selected("flash")


def test_attention_layer_maps_each_level_and_starts_from_zero() -> None:
    layer = attention.FractalLinearAttention(8, 2, 4).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    offsets = [((1 + 5**0.5) / 2) ** (-2 * level) for level in range(3)]
    for level, offset in enumerate(offsets):
        torch.testing.assert_close(layer.feature_map(x, level), stats.elu_plus_one(x + offset), rtol=1e-6, atol=1e-6)
    assert layer(x).shape == x.shape
    torch.testing.assert_close(layer(x)[:, :3], layer(x[:, :3]))
    with pytest.raises(ValueError, match="3 \\* 4 is not 8"):
        attention.FractalLinearAttention(8, 3, 4)
    with pytest.raises(ValueError, match="n_levels"):
        attention.FractalLinearAttention(8, 2, 4, n_levels=0)


def test_farey_sequence_is_all_reduced_fractions_in_order() -> None:
    for n in (1, 2, 5, 12):
        expected = sorted({Fraction(p, q) for q in range(1, n + 1) for p in range(q + 1)})
        assert farey.farey_sequence(n) == [(f.numerator, f.denominator) for f in expected]
    with pytest.raises(ValueError, match="0"):
        farey.farey_sequence(0)


@pytest.mark.parametrize("n_experts", [1, 2, 7, 128])
def test_expert_phases_spread_over_the_farey_sequence(n_experts: int) -> None:
    terms = farey.farey_sequence(2 * n_experts)
    count = len(terms)
    indices = [min(math.floor(i * count / n_experts), count - 1) for i in range(n_experts)]
    assert farey.expert_phases(n_experts) == [2 * math.pi * terms[i][0] / terms[i][1] for i in indices]
    with pytest.raises(ValueError, match="0"):
        farey.expert_phases(0)


def test_elu_plus_one_is_exponential_below_zero_with_finite_gradients() -> None:
    x = torch.tensor([-100.0, -1.0, 0.0, 2.0, 1000.0], dtype=torch.float64, requires_grad=True)
    y = stats.elu_plus_one(x)
    expected = torch.tensor([math.exp(-100), math.exp(-1), 1.0, 3.0, 1001.0], dtype=torch.float64)
    torch.testing.assert_close(y, expected, rtol=1e-15, atol=0.0)
    y.sum().backward()
    assert torch.equal(x.grad[2:], torch.ones(3, dtype=torch.float64))
    assert bool((x.grad > 0).all())
    reference = torch.nn.functional.elu(x, alpha=2.0) + 1.0
    torch.testing.assert_close(stats.elu_plus_one(x, alpha=2.0), reference)


def test_stable_softmax_is_softmax_and_uniform_where_nothing_is_left() -> None:
    logits = torch.tensor([[1e4, 1e4 - 1.0, -1e4], [0.0, 1.0, 2.0]], dtype=torch.float64)
    torch.testing.assert_close(stats.stable_softmax(logits), torch.softmax(logits, -1))
    torch.testing.assert_close(stats.stable_softmax(logits, dim=0), torch.softmax(logits, 0))
    assert torch.equal(stats.stable_softmax(torch.full((2, 4), -math.inf)), torch.full((2, 4), 0.25))
    assert stats.stable_softmax(torch.tensor([math.nan, 1.0])).isnan().all()


def test_kuramoto_layer_takes_its_steps_and_wraps_after_each() -> None:
    layer = KuramotoLayer(6, 5, 2, n_steps=3).double()
    hidden = torch.randn(2, 4, 6, dtype=torch.float64) + 0.3
    theta = layer._encode_from_hidden(hidden)
    start = 2 * math.pi * (hidden.mean(-1, keepdim=True) + torch.arange(5, dtype=torch.float64) / 5)
    torch.testing.assert_close(theta, start % (2 * math.pi))
    layer.n_steps = 1
    for _ in range(3):
        theta = layer._rk4_integrate(theta)
        assert bool(((theta >= 0) & (theta < 2 * math.pi)).all())
    layer.n_steps = 3
    torch.testing.assert_close(layer(hidden), theta)


def test_rk4_is_of_fourth_order() -> None:
    torch.manual_seed(0)
    layer = KuramotoLayer(6, 5, 2, n_steps=1, dt=0.2).double()
    theta = torch.rand(1, 1, 5, dtype=torch.float64) + 2.0
    errors = []
    fine = KuramotoLayer(6, 5, 2, n_steps=256, dt=0.2 / 256).double()
    fine.load_state_dict(layer.state_dict())
    for steps in (1, 2, 4):
        layer.n_steps, layer.dt = steps, 0.2 / steps
        errors.append((layer._rk4_integrate(theta) - fine._rk4_integrate(theta)).abs().max().item())
    assert errors[0] / errors[1] > 10
    assert errors[1] / errors[2] > 10


def test_moe_layer_gates_and_temperature() -> None:
    torch.manual_seed(0)
    layer = PhaseRoutedMoE(6, 5, 2, d_ff=4, expert_rank=3).double()
    phases = torch.rand(2, 3, 4, dtype=torch.float64)
    for temperature in (1.0, 2.5):
        layer.temperature = temperature
        mean = torch.atan2(phases.sin().sum(-1), phases.cos().sum(-1)).unsqueeze(-1)
        expected = torch.softmax(4.0 / temperature * torch.cos(mean - layer.expert_phases), -1)
        torch.testing.assert_close(layer._compute_gates(phases), expected)
    out, balance = layer(torch.randn(2, 3, 6, dtype=torch.float64), phases)
    assert out.shape == (2, 3, 6)
    share = layer._compute_gates(phases).mean((0, 1))
    torch.testing.assert_close(balance, 5 * ((share - 0.2) ** 2).sum())
    assert {name for name, _ in PhaseRoutedMoE(6, 5, 2).named_parameters()} == {"w1", "b1", "w2", "b2"}
    layer.temperature = 0.0
    with pytest.raises(ValueError, match="temperature"):
        layer(torch.randn(2, 3, 6, dtype=torch.float64), phases)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [((0, 4, 2), "d_model"), ((4, 0, 1), "n_experts"), ((4, 3, 4), "top_k"), ((4, 3, 0), "top_k")],
)
def test_moe_layer_refuses_sizes_out_of_range(sizes: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        PhaseRoutedMoE(*sizes)


@pytest.mark.parametrize("ce_chunk", [1, 3, 100])
def test_chunked_cross_entropy_is_the_mean_over_all_rows(ce_chunk: int) -> None:
    h = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    W = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (2, 5))
    expected = torch.nn.functional.cross_entropy((h @ W.T).flatten(0, 1), targets.flatten())
    actual = ce.chunked_cross_entropy(h, W, targets, ce_chunk)
    torch.testing.assert_close(actual, expected)
    for got, want in zip(torch.autograd.grad(actual, [h, W]), torch.autograd.grad(expected, [h, W]), strict=True):
        torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="-100"):
        ce.chunked_cross_entropy(h, W, torch.full((2, 5), -100), ce_chunk)


def test_sample_tokens_chunked_draws_from_its_generator_only() -> None:
    h, W = torch.randn(2, 50, 4), torch.randn(9, 4)
    state = torch.get_rng_state()
    draws = [ce.sample_tokens_chunked(h, W, 0.9, 7, torch.Generator().manual_seed(s)) for s in (3, 3, 4)]
    assert draws[0].shape == (2, 50)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(state, torch.get_rng_state())
    cold = ce.sample_tokens_chunked(h, W, 1e-30, 7, torch.Generator().manual_seed(0))
    assert torch.equal(cold, (h @ W.T).argmax(-1))
