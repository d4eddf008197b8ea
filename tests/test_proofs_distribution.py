"""The sampler's test statistics: uniform p-values for an exact sampler, tiny ones for a slightly wrong one."""

from __future__ import annotations

import math

import numpy as np

from proofs.properties.distribution import ALARM, TESTS, chi_squared_tail, normal_tail, p_value, p_value_of_sum

DRAWS = 2000
KOLMOGOROV_1E_4 = 2.225  # sqrt(n) * D of n uniform numbers exceeds this with probability 1e-4


def exact(cells: int, seed: int) -> np.ndarray:
    weights = np.random.default_rng(seed).exponential(size=cells)
    return weights / weights.sum()


def test_2000_p_values_of_the_exact_sampler_are_uniform() -> None:
    random = np.random.default_rng(11)
    probabilities = exact(12, 3)
    found = np.sort([p_value(random.multinomial(20_000, probabilities), probabilities) for _ in range(DRAWS)])
    rank = np.arange(1, DRAWS + 1) / DRAWS
    distance = max(np.max(rank - found), np.max(found - rank + 1 / DRAWS))
    assert math.sqrt(DRAWS) * distance < KOLMOGOROV_1E_4


def test_p_values_of_the_column_sums_are_conservative_and_not_idle() -> None:
    random = np.random.default_rng(12)
    rows = np.stack([exact(9, seed) for seed in range(6)])
    found = [p_value_of_sum(np.stack([random.multinomial(3000, row) for row in rows]), rows) for _ in range(500)]
    assert np.mean(np.array(found) < 0.05) <= 0.08
    assert min(found) < 0.2


def test_a_few_percent_off_falls_below_the_alarm() -> None:
    random = np.random.default_rng(13)
    probabilities = exact(12, 3)
    off = probabilities**1.05
    p = p_value(random.multinomial(200_000, off / off.sum()), probabilities)
    assert p < ALARM / TESTS


def test_an_impossible_id_is_enough() -> None:
    probabilities = np.array([0.5, 0.5, 0.0])
    assert p_value(np.array([500, 499, 1]), probabilities) == 0.0


def test_tails_are_those_of_the_distributions() -> None:
    assert abs(chi_squared_tail(3.841458820694124, 1) - 0.05) < 1e-9
    assert abs(chi_squared_tail(18.307038053275146, 10) - 0.05) < 1e-9
    assert abs(normal_tail(1.959963984540054) - 0.05) < 1e-9
