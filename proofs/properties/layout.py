"""layout: transposed, strided, offset and expanded inputs give the same answer and gradients.

Not shown: layouts that torch itself does not offer through strides.
"""

from __future__ import annotations

import torch

from proofs.judge import Drawn
from proofs.properties.determinism import equal
from proofs.session import LAYOUTS, Session
from registry import map_leaves


def check(session: Session) -> None:
    """Every non-contiguous form of all inputs at once, of one at a time, and expanded ones."""
    if session.operator.probabilities is not None:
        _same_tokens(session)
        return
    for case in session.cases(("small", "ragged", "edge")):
        drawn = session.draw(case, 60)
        if session.outside(drawn.arguments) is not None:
            continue
        for kind in LAYOUTS[1:]:
            _compare(session, drawn, session.layout_of(drawn, kind), kind)
        if case.kind == "small":
            for name in session.layout_of(drawn, "strided"):
                _compare(session, drawn, {name: "transposed"}, f"{name} transposed")
            _expanded(session, drawn)


def _compare(session: Session, drawn: Drawn, layout: dict[str, str], note: str, key: str = "random") -> None:
    names = session.judge.differentiable(drawn.arguments) if session.claims.grad else []
    cotangents = [session.judge.cotangents(drawn)] if names else []
    expected = session.judge.expected(drawn, cotangents, key=key if names else None)
    answer = session.ask(drawn.arguments, layout=layout, grad=names, cotangents=cotangents)
    session.compare(answer, expected, drawn, note=f"inputs {note}")
    if names:
        session.compare_grads(answer["grads"][0], expected.grads[0], drawn, f"inputs {note}")


def _expanded(session: Session, drawn: Drawn) -> None:
    """One input at a time with its first axis expanded from one row (stride 0)."""
    for index, name in enumerate(session.judge.differentiable(drawn.arguments)[:6]):

        def expand(leaf_name: str, leaf: object, name: str = name) -> object:
            if leaf_name == name and isinstance(leaf, torch.Tensor) and leaf.dim() >= 2:
                return leaf.narrow(0, 0, 1).expand(leaf.shape)
            return leaf

        changed = map_leaves(expand, drawn.arguments)
        if session.operator.margin is not None and session.operator.margin(*changed.values()) < 1e-4:
            continue
        other = Drawn(drawn.case, 6000 + index, changed)
        if session.outside(changed) is None:
            session.compare(session.ask(changed), session.judge.compute(changed), other, note=f"{name} expanded")


def _same_tokens(session: Session) -> None:
    """A sampler draws the same tokens from the same generator whatever the layout."""
    for case in session.cases(("small", "ragged", "edge")):
        drawn = session.draw(case, 60)
        base = session.ask(drawn.arguments)["outputs"][0]
        for kind in LAYOUTS[1:]:
            other = session.ask(drawn.arguments, layout=session.layout_of(drawn, kind))["outputs"][0]
            session.tally.checks += 1
            session.tally.cases.add(case.name)
            equal(f"tokens, inputs {kind} ({drawn.where})", base, other)
