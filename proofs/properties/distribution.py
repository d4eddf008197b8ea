"""distribution: tokens follow the exact probabilities, rows are independent, the generator is the only source.

False-alarm rate 1e-9 in all, shared among the tests. Not shown: deviations too small for the number of draws, which
is recorded.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from proofs.judge import Drawn, Tree
from proofs.session import Session
from proofs.worker import Rejection
from registry import Case

ALARM = 1e-9
DRAWS = 400_000
CALLS = 250
TESTS = 128


def check(session: Session) -> None:
    """Goodness of fit on each case, the generator's use, independence of rows, and the real vocabulary's range."""
    for case in session.cases(("small", "ragged", "edge", "extreme")):
        drawn = session.draw(case, 100)
        _form(session, drawn)
        _generator(session, drawn)
        _fit(session, case)
    _rows(session)
    _independent(session)
    for case in session.cases(("real",)):
        _form(session, session.draw(case, 100))


def _tokens(session: Session, arguments: Tree, seed: int) -> torch.Tensor:
    answer = session.ask({**arguments, "generator": torch.Generator().manual_seed(seed)})
    if len(answer["outputs"]) != 1:
        raise Rejection("wrong_shape", f"returns {len(answer['outputs'])} tensors, the operator 1")
    tokens: torch.Tensor = answer["outputs"][0]
    return tokens


def _form(session: Session, drawn: Drawn) -> None:
    rows, vocabulary = drawn.arguments["hidden"].shape[0], drawn.arguments["weight"].shape[0]
    tokens = _tokens(session, drawn.arguments, 1)
    if not isinstance(tokens, torch.Tensor) or tokens.dtype is not torch.int64:
        raise Rejection(
            "wrong_dtype",
            f"tokens are {getattr(tokens, 'dtype', type(tokens))}, not int64 ({drawn.where})",
            where=drawn.where,
        )
    if tuple(tokens.shape) != (rows,):
        raise Rejection(
            "wrong_shape", f"tokens have shape {tuple(tokens.shape)}, not ({rows},) ({drawn.where})", where=drawn.where
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise Rejection("mismatch", f"a token lies outside 0..{vocabulary - 1} ({drawn.where})", where=drawn.where)
    session.tally.checks += 1
    session.tally.cases.add(drawn.case.name)


def _generator(session: Session, drawn: Drawn) -> None:
    """The same state gives the same tokens, the state advances, and torch's global stream neither helps nor moves."""
    generator = torch.Generator().manual_seed(5)
    answer = session.ask({**drawn.arguments, "generator": generator}, return_inputs=True, observe=True, repeats=2)
    names = session.judge.argument_names()
    after = answer["inputs"][names.index("generator")]
    if not isinstance(after, torch.Generator) or torch.equal(after.get_state(), generator.get_state()):
        raise Rejection("mismatch", f"the generator does not advance ({drawn.where})", where=drawn.where)
    if answer["changed"]:
        raise Rejection("leaked_state", f"changes {', '.join(answer['changed'])} ({drawn.where})", where=drawn.where)
    same = [_tokens(session, drawn.arguments, 5) for _ in range(2)]
    if not torch.equal(same[0], same[1]) or not torch.equal(same[0], answer["first"][0]):
        raise Rejection(
            "mismatch",
            f"the same generator state gives other tokens: it is not the only source ({drawn.where})",
            where=drawn.where,
        )
    session.tally.checks += 1


def p_value(counts: np.ndarray[Any, Any], probabilities: np.ndarray[Any, Any]) -> float:
    """Goodness of fit of counts to probabilities, cells of few expected draws merged; exact impossibilities give 0."""
    total = counts.sum()
    expected = probabilities * total
    if counts[(expected < 1e-12 * total)].sum() > 0:
        return 0.0
    order = np.argsort(expected)
    merged_counts: list[float] = []
    merged_expected: list[float] = []
    count, mean = 0.0, 0.0
    for cell in order:
        count, mean = count + counts[cell], mean + expected[cell]
        if mean >= 10.0:
            merged_counts.append(count)
            merged_expected.append(mean)
            count, mean = 0.0, 0.0
    if not merged_counts:
        return 1.0
    merged_counts[-1] += count
    merged_expected[-1] += mean
    if len(merged_counts) < 2:
        return 1.0
    scale = sum(merged_counts) / sum(merged_expected)
    statistic = sum(
        (count - mean * scale) ** 2 / (mean * scale) for count, mean in zip(merged_counts, merged_expected, strict=True)
    )
    return chi_squared_tail(statistic, len(merged_counts) - 1)


def chi_squared_tail(statistic: float, freedom: int) -> float:
    """P(chi-squared with that many degrees of freedom > statistic)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def normal_tail(z: float) -> float:
    """P(|standard normal| > z)."""
    return math.erfc(abs(z) / math.sqrt(2))


def repeated(arguments: Tree, draws: int) -> tuple[Tree, int]:
    """Each row of hidden repeated so that about ``draws`` tokens come from one call."""
    rows = arguments["hidden"].shape[0]
    times = max(1, draws // rows)
    return {**arguments, "hidden": arguments["hidden"].repeat_interleave(times, 0)}, times


def _fit(session: Session, case: Case) -> None:
    """Pooled over rows by rank of probability, and by token id in single rows: both must fit."""
    drawn = session.draw(case, 101)
    arguments, times = repeated(drawn.arguments, DRAWS)
    assert session.operator.probabilities is not None
    exact = session.operator.probabilities(*[drawn.arguments[n] for n in ("hidden", "weight", "temperature")]).numpy()
    tokens = _tokens(session, arguments, 1234).numpy().reshape(-1, times)
    vocabulary = exact.shape[1]
    counts = np.stack([np.bincount(row, minlength=vocabulary) for row in tokens])
    _accept(session, drawn, "token ids over all rows", p_value_of_sum(counts, exact))
    order = np.argsort(-exact, axis=1)
    ranked = p_value_of_sum(np.take_along_axis(counts, order, 1), np.take_along_axis(exact, order, 1))
    _accept(session, drawn, "ranks of probability", ranked)
    _accept(session, drawn, "log-probabilities", p_value_of_score(counts, exact))
    for row in range(min(4, len(counts))):
        _accept(session, drawn, f"row {row}", p_value(counts[row], exact[row]))


def _rows(session: Session) -> None:
    """Each row by itself over many calls, all rows together: a row that takes another's token shows."""
    drawn = session.draw(next(session.cases(("small",))), 103)
    assert session.operator.probabilities is not None
    exact = session.operator.probabilities(*[drawn.arguments[n] for n in ("hidden", "weight", "temperature")]).numpy()
    tokens = np.stack([_tokens(session, drawn.arguments, 50_000 + call).numpy() for call in range(CALLS)])
    counts = np.stack([np.bincount(column, minlength=exact.shape[1]) for column in tokens.T])
    smallest = min(p_value(count, row) for count, row in zip(counts, exact, strict=True))
    _accept(session, drawn, "single rows", min(1.0, smallest * len(counts)))


def p_value_of_score(counts: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> float:
    """The mean log-probability of the tokens drawn: the statistic that a wrong temperature moves most."""
    score = np.log(np.maximum(exact, 1e-300))
    times = counts.sum(1)
    mean = (exact * score).sum(1)
    variance = float((times * ((exact * score**2).sum(1) - mean**2)).sum())
    if variance < 25.0:
        return 1.0
    return normal_tail(float((counts * score).sum() - (times * mean).sum()) / math.sqrt(variance))


def p_value_of_sum(counts: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> float:
    """Column sums of independent multinomial rows: a normal statistic a column with its own variance, Bonferroni."""
    times = counts.sum(1, keepdims=True)
    mean, variance = (times * exact).sum(0), (times * exact * (1 - exact)).sum(0)
    total = counts.sum(0)
    smallest = 1.0
    for cell in range(len(total)):
        if mean[cell] < 1e-9 * times.sum() and total[cell] > 0:
            return 0.0
        if variance[cell] < 25.0:
            continue
        smallest = min(smallest, normal_tail((total[cell] - mean[cell]) / math.sqrt(variance[cell])))
    return min(1.0, smallest * len(total))


def _accept(session: Session, drawn: Drawn, what: str, p: float) -> None:
    session.tally.checks += 1
    session.tally.cases.add(drawn.case.name)
    session.tally.details["smallest_p"] = min(p, session.tally.details.get("smallest_p", 1.0))
    if p < ALARM / TESTS:
        raise Rejection(
            "mismatch",
            f"{what} do not follow the exact probabilities: p = {p:.3g} ({drawn.where})",
            where=f"{what}, {drawn.where}",
            error=p,
        )


def _independent(session: Session) -> None:
    """Rows with one distribution: tokens of neighbouring rows must not agree more or less often than chance."""
    case = next(session.cases(("small",)))
    drawn = session.draw(case, 102)
    arguments = {**drawn.arguments, "hidden": drawn.arguments["hidden"][:1].expand(4000, -1).contiguous()}
    assert session.operator.probabilities is not None
    exact = session.operator.probabilities(*[arguments[n] for n in ("hidden", "weight", "temperature")])[0].numpy()
    tokens = torch.cat([_tokens(session, arguments, seed) for seed in (7, 8, 9, 10, 11)]).numpy()
    agree = float((exact**2).sum())
    for lag in (1, 2, 3, 64, 2048):
        _accept(session, drawn, f"rows {lag} apart", _agreement_p(tokens[:-lag] == tokens[lag:], agree, exact))


def _agreement_p(pairs: np.ndarray[Any, Any], agree: float, exact: np.ndarray[Any, Any]) -> float:
    """Pairs that overlap share a token: the variance carries their covariance."""
    shared = float((exact**3).sum()) - agree**2
    variance = len(pairs) * (agree * (1 - agree) + 2 * max(0.0, shared))
    return normal_tail((pairs.sum() - len(pairs) * agree) / math.sqrt(max(variance, 1e-12)))
