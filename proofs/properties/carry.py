"""carry: one long run and its splits agree; 64 consecutive chunks stay with the reference, their drift recorded.

Attention: outputs, final carry and gradients into the initial carry. Every operator with a carry: each chunk's
outputs and carry against float64 over the whole chain, c growing with the root of the tokens. Not shown: more
chunks than were run (``--long`` runs 10,000 at default options).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from proofs.budget import Truth
from proofs.judge import MARGIN, Drawn, Expected, Raw, upcast
from proofs.session import Session
from registry import Case

CHUNKS = 64
LONG_CHUNKS = 10_000


def check(session: Session) -> None:
    """Splits first (where there is a time axis), then the long chain."""
    if session.operator.time:
        for case in session.cases(("small", "ragged")):
            for seed in range(2):
                _splits(session, session.draw(case, 20 + seed))
    # Other options change the order of sums inside a chunk, not what is carried: the long chain runs the defaults.
    chain(session, LONG_CHUNKS if session.long and session.is_default else CHUNKS)


def splits(length: int, block: int) -> Iterator[list[int]]:
    """One, ragged, block-1, block, C-1 and per token, as lists of lengths."""
    seen = []
    for first in (1, 7, block - 1, block, length - 1):
        if 0 < first < length and [first, length - first] not in seen:
            seen.append([first, length - first])
    third = length // 3
    if third > 0:
        seen.append([third, length - 2 * third, third])
    seen.append([1] * length)
    yield from seen


def _splits(session: Session, drawn: Drawn) -> None:
    length = drawn.case.sizes["C"]
    names = session.judge.differentiable(drawn.arguments)
    cotangents = [session.judge.cotangents(drawn)]
    expected = session.judge.expected(drawn, cotangents, key="random")
    for lengths in splits(length, session.options.get("block", 64)):
        note = "split per token" if len(lengths) == length else f"split {'+'.join(map(str, lengths))}"
        answer = session.ask(drawn.arguments, chain=lengths, grad=names, cotangents=cotangents)
        # Each split is one more rounding of the carry.
        grow = math.sqrt(len(lengths))
        session.compare(answer, expected, drawn, note=note, grow=grow)
        session.compare_grads(answer["grads"][0], expected.grads[0], drawn, note, grow)


def chain(session: Session, chunks: int) -> None:
    """Feed each chunk the carry of the one before, in variant, reference and oracle; compare every chunk."""
    operator = session.operator
    case = _chain_case(session)
    first = session.draw(case, 40)
    if session.outside(first.arguments) is not None:
        return
    names = session.judge.argument_names()
    variant = first.arguments["carry"]
    reference, oracle = variant, upcast(first.arguments)["carry"]
    drift = []
    for index in range(chunks):
        drawn = _away(session, case, 40 + index, oracle) if index else first
        truth = session.judge.run({**upcast(drawn.arguments), "carry": oracle}, [], [], torch.float64)
        own = session.judge.run({**drawn.arguments, "carry": reference}, [], [], session.judge.torch_dtype)
        answer = session.ask({**drawn.arguments, "carry": variant})
        assert "carry" in names
        session.compare(
            answer,
            _truths(session, own, truth),
            drawn,
            note=f"chunk {index + 1} of {chunks}",
            grow=math.sqrt(index + 1),
        )
        named = dict(zip(operator.outputs, answer["outputs"], strict=True))
        variant = _carried(session, named, drawn.arguments["carry"])
        reference = _carried(session, own.outputs, drawn.arguments["carry"])
        oracle = _carried(session, truth.outputs, oracle)
        drift.append(_drift(session, named, truth))
    points = (
        sorted({round(chunks ** (i / 32)) - 1 for i in range(33)})
        if session.long
        else [0, chunks // 4, chunks // 2, chunks - 1]
    )
    session.tally.details["drift"] = [{"chunk": i + 1, **drift[i]} for i in points]


def _chain_case(session: Session) -> Case:
    case = next(c for c in session.operator.cases() if c.kind in ("small", "ragged") and session.in_sizes(c))
    return replace(case, name=f"{case.name}_chain")


def _away(session: Session, case: Case, seed: int, oracle: Any) -> Drawn:
    """A draw that stays away from discontinuities with the carry that it will really meet."""
    for attempt in range(100):
        drawn = session.draw(case, seed + 1000 * attempt)
        margin = session.operator.margin
        if margin is None or margin(*{**upcast(drawn.arguments), "carry": oracle}.values()) > MARGIN[session.dtype]:
            return drawn
        session.tally.redrawn += 1
    raise AssertionError(f"no draw of {case.name} away from a discontinuity")


def _truths(session: Session, own: Raw, truth: Raw) -> Expected:
    outputs = {}
    for name, oracle in truth.outputs.items():
        if not oracle.dtype.is_floating_point:
            outputs[name] = Truth(oracle, torch.zeros(()), (oracle.dtype,))
            continue
        error = torch.nan_to_num((own.outputs[name].double() - oracle).abs())
        outputs[name] = Truth(oracle, error, (own.outputs[name].dtype, session.judge.torch_dtype))
    return Expected(outputs)


def _carried(session: Session, outputs: dict[str, Any], previous: Any) -> Any:
    items = list(previous)
    for leaf, output in session.operator.carry:
        items[int(leaf.rpartition(".")[2])] = outputs[output].detach()
    return tuple(items)


def _drift(session: Session, named: dict[str, Any], truth: Raw) -> dict[str, float]:
    found = {}
    for _, output in session.operator.carry:
        oracle = truth.outputs[output]
        if oracle.dtype.is_floating_point and output not in session.operator.circular:
            found[output] = float((named[output].double() - oracle).norm() / oracle.norm().clamp_min(1e-300))
    return found
