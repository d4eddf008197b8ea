"""totality: defined wherever the reference is, and a NaN is never hidden.

Length one, odd sizes, zero denominators with finite gradients, values as large as the reference stays finite in, a
carry as after millions of tokens; a NaN input makes non-finite what the recurrence carries it to.
"""

from __future__ import annotations

import math

import torch

from proofs.judge import Drawn
from proofs.session import Session
from proofs.worker import Rejection
from registry import leaves, map_leaves


def check(session: Session) -> None:
    """Finite outputs and gradients where the oracle's are; NaN where the oracle gives NaN."""
    for case in session.cases(("edge", "extreme")):
        for seed in (90, 91):
            drawn = session.draw(case, seed)
            if session.outside(drawn.arguments) is None:
                _finite(session, drawn)
    if not session.operator.mutates:
        for case in session.cases(("small", "ragged")):
            drawn = session.draw(case, 92)
            if session.outside(drawn.arguments) is None:
                _carries_nan(session, drawn)


def _finite(session: Session, drawn: Drawn) -> None:
    names = session.judge.differentiable(drawn.arguments) if session.claims.grad else []
    cotangents = [session.judge.cotangents(drawn)] if names else []
    expected = session.judge.expected(drawn, cotangents, key="random" if names else None)
    answer = session.ask(drawn.arguments, grad=names, cotangents=cotangents)
    session.compare(answer, expected, drawn)
    if names:
        session.compare_grads(answer["grads"][0], expected.grads[0], drawn)


def _carries_nan(session: Session, drawn: Drawn) -> None:
    """One NaN in each floating input at a time: where the truth carries it the variant's output must not be finite."""
    for name, leaf in list(leaves(drawn.arguments)):
        if (
            not isinstance(leaf, torch.Tensor)
            or not leaf.dtype.is_floating_point
            or leaf.numel() == 0
            or name not in session.judge.differentiable(drawn.arguments)
        ):
            continue
        if 0 in leaf.stride() and leaf.numel() > 1:
            continue

        def plant(leaf_name: str, value: object, name: str = name) -> object:
            if leaf_name != name or not isinstance(value, torch.Tensor):
                return value
            planted = value.clone()
            planted.view(-1)[value.numel() // 2] = math.nan
            return planted

        changed = map_leaves(plant, drawn.arguments)
        answer = session.ask(changed)
        named = session.judge.name_outputs(answer["outputs"], [])
        for output, must in _must_be_nan(session, drawn, name).items():
            actual = named[output]
            session.tally.checks += 1
            hidden = (
                must & torch.isfinite(actual)
                if isinstance(actual, torch.Tensor) and actual.shape == must.shape
                else must
            )
            if bool(hidden.any()):
                index = [int(i) for i in hidden.nonzero()[0]] if hidden.dim() else []
                raise Rejection(
                    "non_finite",
                    f"hides a NaN of {name}: {output}{index} is {float(actual[tuple(index)]):.6g} ({drawn.where})",
                    where=f"{output}{index}, {drawn.where}",
                )


def _must_be_nan(session: Session, drawn: Drawn, name: str) -> dict[str, torch.Tensor]:
    """Where an infinitesimal change of the planted element reaches the outputs: there a NaN must show.

    The reach is taken from the oracle's response to a finite change, so a masked product that would spread
    a NaN further in the reference does not count against a variant that does not.
    """
    base = session.judge.run(drawn.arguments, [], [], session.judge.torch_dtype).outputs

    def nudge(leaf_name: str, value: object) -> object:
        if leaf_name != name or not isinstance(value, torch.Tensor):
            return value
        changed = value.clone()
        flat = changed.view(-1)
        flat[value.numel() // 2] = flat[value.numel() // 2] * 1.5 + 0.5
        return changed

    moved = session.judge.run(map_leaves(nudge, drawn.arguments), [], [], session.judge.torch_dtype).outputs
    planted = session.judge.run(
        map_leaves(lambda n, v: _nan(v) if n == name else v, drawn.arguments), [], [], session.judge.torch_dtype
    ).outputs
    found = {}
    for output, value in base.items():
        if value.dtype.is_floating_point and value.shape == moved[output].shape:
            found[output] = (value != moved[output]) & torch.isnan(planted[output])
    return found


def _nan(value: torch.Tensor) -> torch.Tensor:
    planted = value.clone()
    planted.view(-1)[value.numel() // 2] = math.nan
    return planted
