"""purity: inputs unchanged, outputs alias nothing, no state kept or left behind, call 1 and call 20 alike.

Not shown: what a variant does to the machine outside its process, or after more calls than are made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from proofs.judge import Drawn, Tree
from proofs.session import Session
from proofs.worker import Rejection
from registry import leaves, map_leaves

REPEATS = 20


def check(session: Session) -> None:
    """Call with a gradient and without, 20 times on the same inputs, then on others in the same memory."""
    for case in session.cases(("small", "ragged", "edge")):
        drawn = session.draw(case, 11)
        if session.outside(drawn.arguments) is not None:
            continue
        expected = session.judge.expected(drawn)
        names = session.judge.differentiable(drawn.arguments) if session.claims.grad else []
        cotangents = [session.judge.cotangents(drawn)] if names else []
        # With gradients and without: a variant may keep memory only where nothing is tracked.
        for wanted in [names, []] if names else [[]]:
            answer = session.ask(
                drawn.arguments,
                observe=True,
                return_inputs=True,
                repeats=2,
                grad=wanted,
                cotangents=cotangents if wanted else [],
            )
            _observed(session, drawn, answer)
            if not session.operator.mutates and not session.operator.probabilities:
                session.compare(
                    answer, expected, drawn, key="first", note="the first call's output, read after the second"
                )
    if not session.operator.mutates and not session.operator.probabilities:
        _many_calls(session)
        _overwritten_inputs(session)


def _observed(session: Session, drawn: Drawn, answer: dict[str, Any]) -> None:
    unchanged(session, drawn, answer["inputs"], "after the call")
    names = session.judge.argument_names()
    touched = [name for name in answer["touched"] if names[int(name.split(".")[0])] not in session.operator.mutates]
    if touched:
        raise Rejection(
            "mutated_input", f"writes to its input {_readable(names, touched[0])} ({drawn.where})", where=drawn.where
        )
    if answer["aliased"] and not session.operator.mutates:
        raise Rejection("aliased", f"{answer['aliased'][0]} ({drawn.where})", where=drawn.where)
    if answer["changed"]:
        raise Rejection(
            "leaked_state",
            f"leaves behind a change of {', '.join(answer['changed'])} ({drawn.where})",
            where=drawn.where,
        )
    if answer["patched"]:
        raise Rejection(
            "leaked_state", f"replaces {', '.join(answer['patched'][:4])} ({drawn.where})", where=drawn.where
        )
    session.tally.checks += 1
    session.tally.cases.add(drawn.case.name)


def _readable(names: tuple[str, ...], name: str) -> str:
    first, _, rest = name.partition(".")
    return f"{names[int(first)]}{'.' + rest if rest else ''}"


def unchanged(session: Session, drawn: Drawn, after: Sequence[Any], note: str) -> None:
    """Every input leaf that the operator does not declare as mutated holds the bits it was sent with, gradients all."""
    for (name, before), value in zip(drawn.arguments.items(), after, strict=True):
        for (leaf, sent), (_, now) in zip(leaves(before, name), leaves(value, name), strict=True):
            # What ``prepare`` made of an input is another kind of thing, and the variant's own.
            if not isinstance(sent, torch.Tensor) or not isinstance(now, torch.Tensor) or sent.dtype != now.dtype:
                continue
            if name not in session.operator.mutates and not _same(sent, now):
                raise Rejection("mutated_input", f"changes its input {leaf} {note} ({drawn.where})", where=leaf)
            if sent.is_leaf and not _same(sent.grad, now.grad):
                words = f"changes the gradient of its input {leaf} {note} ({drawn.where})"
                raise Rejection("mutated_input", words, where=leaf)


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is None and b is None
    a, b = a.detach().to_dense(), b.detach().to_dense()
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _many_calls(session: Session) -> None:
    """Call 1 and call 20, with other inputs between them, give the same answer as the oracle's."""
    case = next(session.cases(("small",)), None)
    if case is None:
        return
    first = session.draw(case, 12)
    if session.outside(first.arguments) is not None:
        return
    for call in range(REPEATS):
        drawn = first if call in (0, REPEATS - 1) else session.draw(case, 12 + call)
        session.compare(session.ask(drawn.arguments), session.judge.expected(drawn), drawn, note=f"call {call + 1}")
    answer = session.ask(first.arguments, repeats=REPEATS)
    for key in ("first", "outputs"):
        session.compare(
            answer, session.judge.expected(first), first, key=key, note=f"{REPEATS} calls on the same tensors, {key}"
        )


def _overwritten_inputs(session: Session) -> None:
    """Other values in the same tensors: a cache by pointer, identity or a digest would answer the old ones."""
    for case in session.cases(("small", "ragged")):
        drawn = session.draw(case, 13)
        if session.outside(drawn.arguments) is not None:
            continue
        seconds = [session.draw(case, 14).arguments]
        for changed in (_permuted(session, drawn.arguments), _one_element(session, drawn.arguments)):
            if session.operator.margin is None or session.operator.margin(*changed.values()) > 1e-4:
                seconds.append(changed)
        for index, second in enumerate(seconds):
            other = Drawn(case, 1000 + index, second)
            if session.outside(second) is None:
                answer = session.ask(drawn.arguments, "refill", second=second)
                session.compare(answer, session.judge.compute(second), other, note="inputs overwritten in place")


def _permuted(session: Session, arguments: Tree) -> Tree:
    """Every floating input with its elements in another order: the same sum, mean and norm, the same ends."""

    def permute(name: str, leaf: Any) -> Any:
        if not _can_change(session, name, leaf) or leaf.numel() < 4:
            return leaf
        flat = leaf.reshape(-1).clone()
        inner = flat[1:-1].clone()
        flat[1:-1] = torch.roll(inner, 1)
        return flat.reshape(leaf.shape)

    changed: Tree = map_leaves(permute, arguments)
    return changed


def _one_element(session: Session, arguments: Tree) -> Tree:
    """One element in the middle of the first floating input changed."""
    done = False

    def bump(name: str, leaf: Any) -> Any:
        nonlocal done
        if done or not _can_change(session, name, leaf):
            return leaf
        done = True
        changed = leaf.clone()
        changed.view(-1)[leaf.numel() // 2] += 1.0
        return changed

    changed: Tree = map_leaves(bump, arguments)
    return changed


def _can_change(session: Session, name: str, leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray) or not isinstance(leaf, torch.Tensor):
        return False
    expanded = 0 in leaf.stride() and leaf.numel() > 1
    return (
        leaf.dtype.is_floating_point
        and not expanded
        and name in session.judge.differentiable({name.split(".")[0]: _nested(name, leaf)})
    )


def _nested(name: str, leaf: Any) -> Any:
    _, _, rest = name.partition(".")
    return {rest: leaf} if rest else leaf
