"""causality: changing token t changes nothing before t, and a cotangent before t reaches nothing from t on.

Not shown for operators that route by the chunk's last position: they are not causal and do not claim it.
"""

from __future__ import annotations

import torch

from proofs.judge import Drawn
from proofs.session import Session
from proofs.worker import Rejection
from registry import leaves, map_leaves

FACTOR = 1e3


def check(session: Session) -> None:
    """Perturb one token of each time-axis input at a time, at several positions; then look at gradients."""
    for case in session.cases(("small", "ragged", "edge")):
        length = case.sizes["C"]
        drawn = session.draw(case, 30)
        if length < 2 or session.outside(drawn.arguments) is not None:
            continue
        base = session.ask(drawn.arguments)
        session.compare(base, session.judge.expected(drawn), drawn)
        for t in sorted({1, 2, length // 3, length // 2, min(64, length - 1), min(65, length - 1), length - 1}):
            if 0 < t < length:
                _outputs(session, drawn, t, base["outputs"])
                _gradients(session, drawn, t)


def _outputs(session: Session, drawn: Drawn, t: int, base: list[torch.Tensor]) -> None:
    axes = session.operator.time
    for name in [n for n, _ in leaves(drawn.arguments) if n in axes]:
        axis = axes[name]

        def change(leaf_name: str, leaf: object, name: str = name, axis: int = axis) -> object:
            if leaf_name != name or not isinstance(leaf, torch.Tensor):
                return leaf
            changed = leaf.clone()
            changed.narrow(axis, t, 1).mul_(FACTOR).add_(1.0)
            return changed

        answer = session.ask(map_leaves(change, drawn.arguments))
        for output, before, after in zip(session.operator.outputs, base, answer["outputs"], strict=True):
            if output in axes:
                _same(
                    session,
                    drawn,
                    t,
                    f"{output} before token {t} when {name}[{t}] changes",
                    _early(before, axes[output], t),
                    _early(after, axes[output], t),
                )


def _early(tensor: torch.Tensor, axis: int, t: int) -> torch.Tensor:
    return tensor.narrow(axis, 0, t)


def _same(session: Session, drawn: Drawn, t: int, what: str, before: torch.Tensor, after: torch.Tensor) -> None:
    difference = (before.double() - after.double()).abs().max().item()
    allowed = session.operator.tolerance.c * session.judge.eps * before.double().abs().max().item()
    session.tally.checks += 1
    if not difference <= allowed:
        raise Rejection(
            "mismatch",
            f"{what}: moves by {difference:.3g} ({drawn.where})",
            where=f"token {t}, {drawn.where}",
            error=difference,
        )


def _gradients(session: Session, drawn: Drawn, t: int) -> None:
    """Cotangents that are zero from t on give gradients that are zero from t on."""
    if not session.claims.grad:
        return
    axes = session.operator.time
    cotangents = []
    for output, cotangent in zip(session.operator.outputs, session.judge.cotangents(drawn), strict=True):
        assert cotangent is not None
        early = torch.zeros_like(cotangent)
        if output in axes:
            early.narrow(axes[output], 0, t).copy_(cotangent.narrow(axes[output], 0, t))
        cotangents.append(early)
    names = [n for n, _ in leaves(drawn.arguments) if n in axes]
    grads = session.ask(drawn.arguments, grad=names, cotangents=[cotangents])["grads"][0]
    for name in names:
        if grads[name] is None:
            continue
        late = grads[name].narrow(axes[name], t, grads[name].shape[axes[name]] - t).abs().max().item()
        session.tally.checks += 1
        if not late == 0:
            raise Rejection(
                "mismatch",
                f"gradient of {name} at or after token {t} is {late:.3g} for a loss of earlier tokens ({drawn.where})",
                where=f"d{name}, {drawn.where}",
                error=late,
            )
