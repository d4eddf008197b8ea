"""Wrong and right block variants."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

import registry
from fractus.core import attended, below, block_core, clock, norm
from fractus.kuramoto import start_phases, velocity, wrap


def finish(parameters, h, theta, routing):
    """The mixture on top of the attention's output."""
    x = norm(parameters, "norm_moe", h)
    out, balance = parameters["moe"](
        x, routing, below(parameters, "moe."), parameters["top_k"], parameters["concentration"]
    )
    return h + out, balance


def composed(parameters, h, carry, *, clock=clock, position=-1):
    """The block with its clock and routing position exchangeable."""
    h, S, z = attended(parameters, h, carry)
    theta = clock(parameters, h)
    routing = theta[:, position, :].unsqueeze(1)
    out, balance = finish(parameters, h, theta, routing)
    return out, balance, (S.detach(), z.detach(), theta.detach())


@registry.variant(operator="block", name="identity_block")
def identity_block(parameters, h, carry):
    """1. Returns its input."""
    _, balance, state = block_core(parameters, h, carry)
    return h + 0, balance, state


@registry.variant(operator="block", name="carry_twice")
def carry_twice(parameters, h, carry):
    """46. The recompute of activation checkpointing updates the carry a second time."""
    state = [carry[0], carry[1]]

    def run(x):
        out, balance, (S, z, theta) = block_core(parameters, x, (carry[0], carry[1], carry[2]))
        with torch.no_grad():
            state[0].data.copy_(S)
            state[1].data.copy_(z)
        return out, balance, theta

    out, balance, theta = checkpoint(run, h, use_reentrant=False)
    return out, balance, (state[0].clone(), state[1].clone(), theta.detach())


@registry.variant(operator="block", name="fresh_noise_in_recompute")
def fresh_noise_in_recompute(parameters, h, carry):
    """47. The recompute draws fresh randomness."""
    source = torch.Generator().manual_seed(3)

    def run(x):
        gain = 1 + 1e-2 * (torch.rand((), generator=source, dtype=x.dtype) - 0.5)
        out, balance, state = block_core(parameters, x * 1.0, carry)
        kept = out + (x * gain - (x * gain).detach()) - (x - x.detach())
        return kept, balance, *state

    out, balance, S, z, theta = checkpoint(run, h, use_reentrant=False)
    return out, balance, (S.detach(), z.detach(), theta.detach())


@registry.variant(operator="block", name="clock_without_gradient")
def clock_without_gradient(parameters, h, carry):
    """35. The clock runs without gradients: omega never trains."""
    return composed(parameters, h, carry, clock=lambda p, x: clock(p, x).detach())


@registry.variant(operator="block", name="balance_without_gradient")
def balance_without_gradient(parameters, h, carry):
    """35. The load balance is detached: experts die."""
    out, balance, state = block_core(parameters, h, carry)
    return out, balance.detach(), state


@registry.variant(operator="block", name="carry_not_detached")
def carry_not_detached(parameters, h, carry):
    """35. The carry keeps the graph of the chunk."""
    x, S, z = attended(parameters, h, carry)
    theta = clock(parameters, x)
    out, balance = finish(parameters, x, theta, theta[:, -1:])
    return out, balance, (S, z, theta.detach())


@registry.variant(operator="block", name="captured_gradient_wrong")
def captured_gradient_wrong(parameters, h, carry):
    """38. The output bias's gradient is halved, the listed inputs' are right."""
    bias = parameters["attn.b_out"]
    return block_core(parameters.replace(**{"attn.b_out": 0.5 * bias + 0.5 * bias.detach()}), h, carry)


@registry.variant(operator="block", name="euler")
def euler(parameters, h, carry):
    """14. An Euler step for the Runge-Kutta step."""

    def step(p, x):
        theta = start_phases(norm(p, "norm_kur", x), p["kuramoto.omega"].shape[0])
        return wrap(
            theta
            + 0.1 * velocity(theta, p["kuramoto.omega"], p["kuramoto.coupling_u"], p["kuramoto.coupling_lambda"], 0.01)
        )

    return composed(parameters, h, carry, clock=step)


@registry.variant(operator="block", name="first_position_routes")
def first_position_routes(parameters, h, carry):
    """48. The first position's phases route the chunk."""
    return composed(parameters, h, carry, position=0)


@registry.variant(operator="block", name="phases_read")
def phases_read(parameters, h, carry):
    """42. The carried phases are read back and mixed in."""
    out, balance, (S, z, theta) = block_core(parameters, h, carry)
    return out, balance, (S, z, wrap(theta + 0.01 * carry[2][:, -1:]))


@registry.variant(operator="block", name="carry_ignored")
def carry_ignored(parameters, h, carry):
    """42. Starts every chunk from an empty carry."""
    return block_core(parameters, h, (carry[0] * 0, carry[1] * 0, carry[2]))


@registry.variant(operator="block", name="carry_of_first_level")
def carry_of_first_level(parameters, h, carry):
    """45. The carry is doubled and not averaged over levels."""
    out, balance, (S, z, theta) = block_core(parameters, h, carry)
    return out, balance, (S * 2, z * 2, theta)


@registry.variant(operator="block", name="drifting_carry")
def drifting_carry(parameters, h, carry):
    """42. A carry that fades by a hundred-thousandth a chunk."""
    out, balance, (S, z, theta) = block_core(parameters, h, carry)
    return out, balance, (S * (1 - 1e-4), z * (1 - 1e-4), theta)


@registry.variant(operator="block", name="other_epsilon", dtypes=("float64",))
def other_epsilon(parameters, h, carry):
    """44. LayerNorm with an epsilon of 1e-6."""
    x = torch.nn.functional.layer_norm(h, h.shape[-1:], eps=1e-6)
    y = torch.nn.functional.layer_norm(h, h.shape[-1:], eps=1e-5)
    out, balance, state = block_core(parameters, h, carry)
    return out + (x - y), balance, state


@registry.variant(operator="block", name="bf16_hidden")
def bf16_hidden(parameters, h, carry):
    """20. The hidden state rounded to bfloat16."""
    return block_core(parameters, h + (h.detach().bfloat16().to(h.dtype) - h.detach()), carry)


@registry.variant(operator="block", name="residual_in_place")
def residual_in_place(parameters, h, carry):
    """22. Adds the result into the hidden state it was given."""
    out, balance, state = block_core(parameters, h, carry)
    with torch.no_grad():
        h.data.copy_(out)
    return out, balance, state


@registry.variant(operator="block", name="returns_given_phases")
def returns_given_phases(parameters, h, carry):
    """23. Writes the phases into the carry it was given and returns that."""
    out, balance, (S, z, theta) = block_core(parameters, h, carry)
    if carry[2].shape == theta.shape:
        return out, balance, (S, z, carry[2].data.copy_(theta))
    return out, balance, (S, z, theta)


LAST = {}


@registry.variant(operator="block", name="carry_kept_inside")
def carry_kept_inside(parameters, h, carry):
    """30. Keeps the carry itself and ignores the one it is given."""
    key = (h.shape, h.dtype)
    S, z = LAST.get(key, (carry[0], carry[1]))
    out, balance, state = block_core(parameters, h, (S.detach() + 0 * carry[0], z.detach() + 0 * carry[1], carry[2]))
    LAST[key] = (state[0], state[1])
    return out, balance, state


@registry.variant(operator="block", name="reentrant_free_checkpoint")
def reentrant_free_checkpoint(parameters, h, carry):
    """RIGHT 46. Checkpointed with the carry outside."""
    out, balance, S, z, theta = checkpoint(lambda x: _flat(block_core(parameters, x, carry)), h, use_reentrant=False)
    return out, balance, (S.detach(), z.detach(), theta.detach())


def _flat(result):
    out, balance, state = result
    return out, balance, *state


@registry.variant(operator="block", name="composed_block")
def composed_block(parameters, h, carry):
    """RIGHT 41. The same parts put together anew."""
    return composed(parameters, h, carry)
