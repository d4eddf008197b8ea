"""What the judge keeps: inputs and truths, the longest unused given up first, the 1B shape run once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from proofs import judge
from registry import load


@dataclass(frozen=True)
class Held:
    """So many bytes."""

    size: int

    def nbytes(self) -> int:
        return self.size


def test_the_longest_unused_go_when_the_limit_is_passed() -> None:
    kept: judge._Kept[Held] = judge._Kept(100)
    made: list[str] = []

    def get(name: str, size: int = 40) -> Held:
        def make() -> Held:
            made.append(name)
            return Held(size)

        return kept.get(name, make)

    for name in ("a", "b", "a", "c", "a", "b"):
        get(name)
    # b is the longest unused when c comes.
    assert made == ["a", "b", "c", "b"]
    assert kept.held_bytes == 80
    assert get("large", 1000).size == 1000
    assert list(kept.values) == ["large"]
    assert kept.held_bytes == 1000


def test_small_values_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "ENTRIES", 3)
    kept: judge._Kept[Held] = judge._Kept(1 << 30)
    for number in range(10):
        kept.get(number, lambda: Held(1))
    assert list(kept.values) == [7, 8, 9]


def test_the_real_shape_is_run_once_for_forward_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    examined = judge.Judge(load(), "attention", "float32")
    case = replace(examined.operator.cases()[0], kind="real")
    runs: list[int] = []
    compute = examined.compute

    def counted(*arguments: object) -> judge.Expected:
        runs.append(1)
        return compute(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(examined, "compute", counted)
    drawn = examined.draw(case, 0)
    assert examined.draw(case, 0) is drawn
    forward = examined.expected(drawn)
    cotangents = [examined.cotangents(drawn)]
    gradient = examined.expected(drawn, cotangents, key="random")
    assert gradient is forward
    assert len(runs) == 1
    # The oracle was given the cotangents that the variant gets: the same truth as when they are handed over.
    handed = compute(drawn.arguments, cotangents, examined.differentiable(drawn.arguments))
    for name, truth in handed.grads[0].items():
        ours = forward.grads[0][name]
        assert truth is not None
        assert ours is not None
        assert bool((ours.oracle == truth.oracle).all()), name
        assert bool((ours.reference_error == truth.reference_error).all()), name
