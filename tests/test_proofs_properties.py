"""Each property by itself rejects an adversary made for it and lets a right variant pass: a broken one shows here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proofs.judge import Drawn, Judge
from proofs.matrix import FOLDER
from proofs.prover import Plan, claims_of, judged, missing_requirement
from proofs.session import Claims, Session
from proofs.worker import Worker
from registry import PROPERTIES, load

# property, operator, adversary that only this property's own check is asked about, dtype, the status it must give
KILLS = [
    ("forward", "attention", "last_group_wrong", "float32", "mismatch"),
    ("forward", "attention", "larger_epsilon", "float32", "mismatch"),
    ("forward", "moe", "bf16_inside", "float32", "mismatch"),
    ("gradient", "attention", "contiguous_cotangent", "float32", "mismatch"),
    ("gradient", "attention", "stride_zero_cotangent", "float32", "mismatch"),
    ("gradient", "attention", "second_backward_adds", "float32", "mismatch"),
    ("gradient", "attention", "backward_writes_saved", "float32", "mismatch"),
    ("carry", "attention", "carry_gradient_shifted", "float32", "mismatch"),
    ("carry", "block", "drifting_carry", "float32", "mismatch"),
    ("causality", "attention", "later_token", "float32", "mismatch"),
    ("causality", "attention", "later_token_detached", "float32", "mismatch"),
    ("determinism", "attention", "claims_bitwise", "float32", "mismatch"),
    ("purity", "attention", "cached_by_sum", "float32", "mismatch"),
    ("purity", "attention", "one_output_buffer", "float32", "aliased"),
    ("purity", "attention", "carry_in_place", "float32", "mutated_input"),
    ("purity", "attention", "precision_changed", "float32", "leaked_state"),
    ("purity", "attention", "patches_timer", "float32", "leaked_state"),
    ("purity", "attention", "thread_left", "float32", "leaked_state"),
    ("layout", "attention", "contiguous_inputs", "float32", "mismatch"),
    ("totality", "attention", "hides_nan", "float32", "non_finite"),
    ("totality", "attention", "unsafe_division", "float32", "non_finite"),
    ("poison", "attention", "fresh_nan", "float32", "not_written"),
    ("autocast", "attention", "autocast_backward", "bfloat16_autocast", "mismatch"),
    ("memory", "attention", "claims_little_memory", "float32", "over_memory"),
    ("distribution", "sampler", "temperature_off", "float32", "mismatch"),
    ("distribution", "sampler", "pairs_share_a_draw", "float32", "mismatch"),
    ("identity", "attention", "silent_fall_back", "float32", "fell_back"),
]
RIGHT = {"attention": "backwards_sum", "block": "composed_block", "sampler": "gumbel", "moe": "row_loop"}


@pytest.fixture(scope="module")
def judges() -> dict[tuple[str, str], Judge]:
    return {}


def session(judges: dict[tuple[str, str], Judge], worker: Worker, operator: str, name: str, dtype: str) -> Session:
    judge = judges.setdefault((operator, dtype), Judge(load(), operator, dtype))
    claims = claims_for(operator, name)
    return Session(judge, worker, claims, claims.option_sets()[0], examples=4, real=False)


CLAIMS: dict[str, list[Claims]] = {}


def claims_for(operator: str, name: str) -> Claims:
    if operator not in CLAIMS:
        CLAIMS[operator] = claims_of(Plan(plugins=(FOLDER / f"{operator}.py",)), only_plugins=True)
    return next(c for c in CLAIMS[operator] if c.name == name)


@pytest.mark.parametrize(
    ("property_name", "operator", "name", "dtype", "status"), KILLS, ids=[f"{k[0]}-{k[2]}" for k in KILLS]
)
def test_a_property_rejects_its_adversary(
    judges: dict[tuple[str, str], Judge], property_name: str, operator: str, name: str, dtype: str, status: str
) -> None:
    with Worker((FOLDER / f"{operator}.py",), 20.0) as worker:
        outcome = judged(property_name, session(judges, worker, operator, name, dtype))
    assert outcome[0] == status, outcome


@pytest.mark.parametrize("property_name", PROPERTIES)
def test_a_property_lets_a_right_variant_pass(judges: dict[tuple[str, str], Judge], property_name: str) -> None:
    operator = "sampler" if property_name == "distribution" else "attention"
    name = RIGHT[operator] if property_name != "memory" else ""
    dtype = "bfloat16_autocast" if property_name == "autocast" else "float32"
    if property_name == "memory":
        claims = next(c for c in claims_of(Plan(), only_plugins=False) if c.key == "attention/chunked")
        with Worker((), 20.0) as worker:
            judge = judges.setdefault(("attention", dtype), Judge(load(), "attention", dtype))
            outcome = judged("memory", Session(judge, worker, claims, claims.option_sets()[0], examples=4, real=False))
    else:
        with Worker((FOLDER / f"{operator}.py",), 20.0) as worker:
            outcome = judged(property_name, session(judges, worker, operator, name, dtype))
    assert outcome[0] == "passed", outcome


def test_every_property_has_an_adversary_here() -> None:
    assert {kill[0] for kill in KILLS} == set(PROPERTIES)


def test_a_missing_requirement_is_a_reason_and_no_error() -> None:
    claims = claims_for("attention", "zeros")
    needy = Claims(**{**vars(claims), "requires": ("no-such-distribution>=1",)})
    assert missing_requirement(needy) == "requires no-such-distribution>=1, which is not installed"
    old = Claims(**{**vars(claims), "requires": ("torch<2",)})
    assert "installed is" in str(missing_requirement(old))
    assert missing_requirement(claims) is None


def test_a_drawn_shape_whose_gradient_is_zero_in_truth_is_no_error(
    judges: dict[tuple[str, str], Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One token without a carry: y is v, and nothing depends on q. Of a declared case it would be an error.
    def only(self: Session, holds: Callable[[Drawn, str], None]) -> None:
        case = next(c for c in self.operator.cases() if c.values == "zero_carry")
        holds(self.draw(case.resized(G=1, C=1, K=2), 0), "contiguous")

    monkeypatch.setattr(Session, "for_drawn_shapes", only)
    with Worker((FOLDER / "attention.py",), 20.0) as worker:
        outcome = judged("gradient", session(judges, worker, "attention", RIGHT["attention"], "float32"))
    assert outcome[0] == "passed", outcome
