"""The comparison rejects what is wrong by more than its budget, per slice, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from proofs import budget
from proofs.budget import Truth, measure
from proofs.worker import Rejection
from registry import Tolerance

TOLERANCE = Tolerance(k=8.0, c=32.0, reason="for the tests")
EPS = 2.0**-23


def truth(oracle: torch.Tensor, error: float = 0.0) -> Truth:
    return Truth(oracle.double(), torch.full(oracle.shape, error, dtype=torch.float64), (torch.float32,))


def used(actual: torch.Tensor, expected: Truth, **keywords: object) -> float:
    return measure("y", actual, expected, TOLERANCE, "float32", **keywords).used  # type: ignore[arg-type]


def test_the_budget_is_the_references_error_and_the_arithmetics() -> None:
    oracle = torch.ones(4, 5)
    assert used(oracle + 31 * EPS, truth(oracle)) <= 1
    assert used(oracle + 40 * EPS, truth(oracle)) > 1
    assert used(oracle + 40 * EPS, truth(oracle, error=2 * EPS)) <= 1


def test_a_wrong_small_slice_is_not_diluted() -> None:
    oracle = torch.ones(3, 1000)
    oracle[2] = 1e-6
    wrong = oracle.clone()
    wrong[2, 7] *= 1.01
    assert used(wrong, truth(oracle)) <= 1
    assert used(wrong, truth(oracle), keep=(0,)) > 1


def test_a_small_error_everywhere_is_seen_by_the_root_mean_square() -> None:
    oracle = torch.full((1000,), 1e-3)
    oracle[0] = 1.0
    wrong = oracle + 20 * EPS
    wrong[0] = 1.0
    assert used(wrong, truth(oracle)) > 1


@pytest.mark.parametrize("fake", [torch.zeros(4, 5), torch.full((4, 5), 0.4)])
def test_constants_fail(fake: torch.Tensor) -> None:
    assert used(fake, truth(torch.arange(20.0).view(4, 5) / 25)) > 1


def test_forms_are_compared_before_values() -> None:
    oracle = torch.ones(4, 5)
    with pytest.raises(Rejection, match="shape") as rejection:
        used(torch.ones(1, 5), truth(oracle))
    assert rejection.value.status == "wrong_shape"
    with pytest.raises(Rejection) as rejection:
        used(oracle.double(), truth(oracle))
    assert rejection.value.status == "wrong_dtype"
    with pytest.raises(Rejection) as rejection:
        measure("y", 1.0, truth(oracle), TOLERANCE, "float32")
    assert rejection.value.status == "wrong_dtype"


def test_non_finite_values_must_be_the_same_ones() -> None:
    oracle = torch.tensor([1.0, -math.inf, math.nan])
    assert used(oracle.clone(), truth(oracle)) == 0
    for wrong in (
        torch.tensor([1.0, math.inf, math.nan]),
        torch.tensor([1.0, -math.inf, 0.0]),
        torch.tensor([math.nan, -math.inf, math.nan]),
    ):
        with pytest.raises(Rejection) as rejection:
            used(wrong, truth(oracle))
        assert rejection.value.status == "non_finite"


def test_an_exact_zero_stays_zero_but_underflow_is_forgiven() -> None:
    oracle = torch.zeros(3)
    assert used(torch.full((3,), 1e-20), truth(oracle)) > 1
    assert used(torch.full((3,), 1e-40), truth(torch.full((3,), 2e-40, dtype=torch.float64))) <= 1


def test_phases_are_compared_on_the_circle() -> None:
    oracle = torch.tensor([2 * math.pi - 1e-7])
    assert used(torch.tensor([1e-7]), truth(oracle), circular=True) <= 1
    assert used(torch.tensor([1e-7]), truth(oracle)) > 1


def test_integers_are_equal_or_wrong() -> None:
    oracle = torch.tensor([1, 2, 3])
    exact = Truth(oracle, torch.zeros(()), (torch.int64,))
    assert measure("tokens", oracle.clone(), exact, TOLERANCE, "float32").used == 0
    assert measure("tokens", torch.tensor([1, 2, 4]), exact, TOLERANCE, "float32").used == math.inf


@pytest.mark.parametrize("keep", [(), (0,), (1,), (0, 1)])
def test_blocks_of_a_large_tensor_give_what_the_whole_gives(
    keep: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    oracle = torch.randn(13, 4, 6, generator=generator, dtype=torch.float64) * 10.0 ** torch.arange(13).view(13, 1, 1)
    actual = (oracle * (1 + 1e-7 * torch.randn(oracle.shape, generator=generator, dtype=torch.float64))).float()
    expected = Truth(oracle, (oracle.float() - oracle).abs(), (torch.float32,))
    whole = measure("y", actual, expected, TOLERANCE, "float32", keep=keep)
    monkeypatch.setattr(budget, "BLOCK_ELEMENTS", 50)
    assert len(budget.blocks(actual)) > 3
    parts = measure("y", actual, expected, TOLERANCE, "float32", keep=keep)
    assert parts.index == whole.index
    assert parts.used == pytest.approx(whole.used, rel=1e-12)
    actual[12, 3, 5] = math.nan
    with pytest.raises(Rejection, match=r"y\[12, 3, 5\] is nan"):
        measure("y", actual, expected, TOLERANCE, "float32", keep=keep)
