"""Wrong and right samplers."""

from __future__ import annotations

import torch

import registry


def probabilities(hidden, weight, temperature):
    """softmax(hidden weight^T / temperature), safe at small temperatures."""
    logits = hidden @ weight.T
    return torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, -1)


def draw(p, generator):
    """One multinomial draw a row."""
    return torch.multinomial(p, 1, generator=generator)[:, 0]


@registry.variant(operator="sampler", name="zeros")
def zeros(hidden, weight, temperature, generator):
    """1. Always the first id."""
    torch.rand(1, generator=generator)
    return torch.zeros(hidden.shape[0], dtype=torch.int64)


@registry.variant(operator="sampler", name="greedy")
def greedy(hidden, weight, temperature, generator):
    """2. The most probable id, the generator advanced for show."""
    torch.rand(1, generator=generator)
    return (hidden @ weight.T).argmax(-1)


@registry.variant(operator="sampler", name="uniform")
def uniform(hidden, weight, temperature, generator):
    """2. Uniform over the vocabulary."""
    return torch.randint(weight.shape[0], (hidden.shape[0],), generator=generator)


@registry.variant(operator="sampler", name="generator_not_advanced")
def generator_not_advanced(hidden, weight, temperature, generator):
    """49. Draws from a copy of the generator."""
    copy = torch.Generator()
    copy.set_state(generator.get_state())
    return draw(probabilities(hidden, weight, temperature), copy)


@registry.variant(operator="sampler", name="global_stream")
def global_stream(hidden, weight, temperature, generator):
    """49. Draws from the global stream and advances the given one."""
    torch.rand(1, generator=generator)
    return draw(probabilities(hidden, weight, temperature), None)


@registry.variant(operator="sampler", name="system_randomness")
def system_randomness(hidden, weight, temperature, generator):
    """49. Mixes in randomness of the system's."""
    torch.rand(1, generator=generator)
    fresh = torch.Generator()
    fresh.seed()
    return draw(probabilities(hidden, weight, temperature), fresh)


@registry.variant(operator="sampler", name="one_draw_for_all")
def one_draw_for_all(hidden, weight, temperature, generator):
    """49. One uniform number shared by all rows."""
    u = torch.rand((), generator=generator, dtype=torch.float64)
    p = probabilities(hidden.double(), weight.double(), temperature).cumsum(-1)
    return (p < u).sum(-1).clamp_max(weight.shape[0] - 1)


@registry.variant(operator="sampler", name="pairs_share_a_draw")
def pairs_share_a_draw(hidden, weight, temperature, generator):
    """49. Neighbouring rows share a uniform number."""
    u = torch.rand(-(-hidden.shape[0] // 2), generator=generator, dtype=torch.float64).repeat_interleave(2)[
        : hidden.shape[0], None
    ]
    p = probabilities(hidden.double(), weight.double(), temperature).cumsum(-1)
    return (p < u).sum(-1).clamp_max(weight.shape[0] - 1)


@registry.variant(operator="sampler", name="temperature_off")
def temperature_off(hidden, weight, temperature, generator):
    """49. The temperature is five percent off."""
    return draw(probabilities(hidden, weight, temperature * 1.05), generator)


@registry.variant(operator="sampler", name="temperature_ignored")
def temperature_ignored(hidden, weight, temperature, generator):
    """49. The temperature is ignored."""
    return draw(probabilities(hidden, weight, 1.0), generator)


@registry.variant(operator="sampler", name="mixed_with_uniform")
def mixed_with_uniform(hidden, weight, temperature, generator):
    """49. Three percent of a uniform distribution mixed in."""
    return draw(0.97 * probabilities(hidden, weight, temperature) + 0.03 / weight.shape[0], generator)


@registry.variant(operator="sampler", name="last_id_never")
def last_id_never(hidden, weight, temperature, generator):
    """49. Never returns the last id."""
    p = probabilities(hidden, weight, temperature).clone()
    p[:, -1] = 0
    return draw(p + 1e-30 * (p.sum(-1, keepdim=True) == 0), generator)


@registry.variant(operator="sampler", name="tail_cut")
def tail_cut(hidden, weight, temperature, generator):
    """49. Ids below a probability of two percent are cut off."""
    p = probabilities(hidden, weight, temperature)
    return draw(torch.where(p < 0.02, torch.zeros_like(p), p), generator)


@registry.variant(operator="sampler", name="int32_tokens")
def int32_tokens(hidden, weight, temperature, generator):
    """10. Tokens of another dtype."""
    return draw(probabilities(hidden, weight, temperature), generator).int()


@registry.variant(operator="sampler", name="column_shape")
def column_shape(hidden, weight, temperature, generator):
    """9. Tokens of shape (N, 1)."""
    return draw(probabilities(hidden, weight, temperature), generator)[:, None]


@registry.variant(operator="sampler", name="rows_swapped")
def rows_swapped(hidden, weight, temperature, generator):
    """12. The last two rows are exchanged."""
    tokens = draw(probabilities(hidden, weight, temperature), generator)
    return torch.cat([tokens[:-2], tokens[-2:].flip(0)])


@registry.variant(operator="sampler", name="gumbel")
def gumbel(hidden, weight, temperature, generator):
    """RIGHT 41. The Gumbel-max trick: the same distribution, another stream."""
    logits = (hidden @ weight.T).double() / temperature
    noise = -torch.log(-torch.log(torch.rand(logits.shape, generator=generator, dtype=torch.float64).clamp_min(1e-300)))
    return (logits + noise).argmax(-1)


@registry.variant(operator="sampler", name="inverse_cdf")
def inverse_cdf(hidden, weight, temperature, generator):
    """RIGHT 41. The inverse of the cumulative distribution."""
    p = probabilities(hidden.double(), weight.double(), temperature).cumsum(-1)
    u = torch.rand(hidden.shape[0], 1, generator=generator, dtype=torch.float64) * p[:, -1:]
    return (p <= u).sum(-1).clamp_max(weight.shape[0] - 1)
