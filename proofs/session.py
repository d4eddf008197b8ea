"""One variant under examination at one dtype: asks the child, compares with the judge's truth, keeps the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from proofs.budget import Measured, measure
from proofs.judge import Drawn, Expected, Judge, Tree
from proofs.worker import Rejection, Worker
from registry import Case, leaves, map_leaves
from registry.static import required_properties

SEEDS = 5
LAYOUTS = ("contiguous", "transposed", "strided", "offset")


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What a variant declares, as the prover needs it; read from the child that loaded it."""

    operator: str
    name: str
    module: str
    options: dict[str, list[int]]
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: dict[str, list[int]]
    conditions: tuple[str, ...]
    grad: bool
    single_backward: bool
    requires: tuple[str, ...]
    determinism: str
    memory_bound: bool
    falls_back: bool
    compiled: bool
    summary: str

    @property
    def key(self) -> str:
        """``operator/name``."""
        return f"{self.operator}/{self.name}"

    def option_sets(self) -> list[dict[str, int]]:
        """Defaults, then each option at either end of its range."""
        defaults = {name: bounds[0] for name, bounds in self.options.items()}
        sets = [defaults]
        for name, (_, low, high) in self.options.items():
            sets += [c for v in (low, high) if (c := {**defaults, name: v}) not in sets]
        return sets

    def properties(self, declared: Sequence[str], dtype: str) -> tuple[str, ...]:
        """The properties that must hold at a dtype."""
        return required_properties(declared, dtype, grad=self.grad, memory=self.memory_bound)


@dataclass
class Tally:
    """The numbers of one property's check."""

    cases: set[str] = field(default_factory=set)
    checks: int = 0
    redrawn: int = 0
    worst_error: float = 0.0
    budget_used: float = 0.0
    where: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def add(self, measured: Measured, case: str, where: str) -> None:
        """Count one comparison."""
        self.checks += 1
        self.cases.add(case)
        self.worst_error = max(self.worst_error, measured.error)
        if measured.used > self.budget_used or not self.where:
            self.budget_used, self.where = max(self.budget_used, measured.used), where


class Session:
    """A variant, its options, a dtype: what a property's ``check`` works with."""

    def __init__(
        self,
        judge: Judge,
        worker: Worker,
        claims: Claims,
        options: dict[str, int],
        *,
        examples: int = 20,
        fresh: int | None = None,
        long: bool = False,
        real: bool = True,
        seeds: int = SEEDS,
    ) -> None:
        self.judge, self.worker, self.claims, self.options = judge, worker, claims, options
        self.operator = judge.operator
        self.dtype, self.device = judge.dtype, judge.device
        self.examples, self.fresh, self.long, self.real = examples, fresh, long, real
        self.seeds_a_case = seeds
        self.tally = Tally()
        self.is_default = all(options[name] == bounds[0] for name, bounds in claims.options.items())

    # --- cases and inputs

    def cases(self, kinds: Sequence[str] = ("small", "ragged", "edge", "extreme", "real")) -> Iterator[Case]:
        """The operator's cases that lie in the claimed domain; the 1B shape once, in float32 at default options."""
        for case in self.operator.cases():
            real = self.real and self.dtype == "float32" and self.is_default
            if case.kind in kinds and self.in_sizes(case) and (case.kind != "real" or real):
                yield case

    def in_sizes(self, case: Case) -> bool:
        """Whether a case's sizes lie in the claimed ``shapes``."""
        return all(
            low <= case.sizes[letter] <= high and case.sizes[letter] % multiple == 0
            for letter, (low, high, multiple) in self.claims.shapes.items()
            if letter in case.sizes
        )

    def seeds(self, case: Case) -> range:
        """Fresh seeds of a case: one for the 1B shape."""
        return range(1) if case.kind == "real" else range(self.seeds_a_case)

    def draw(self, case: Case, seed: int) -> Drawn:
        """Inputs, away from discontinuities; redraws are counted."""
        drawn = self.judge.draw(case, seed)
        self.tally.redrawn += drawn.redrawn
        return drawn

    def outside(self, arguments: Tree) -> str | None:
        """Why the arguments lie outside the claimed conditions, or None."""
        for name in self.claims.conditions:
            refusal = self.operator.conditions[name](*arguments.values())
            if refusal is not None:
                return f"{name}: {refusal}"
        return None

    # --- asking

    def ask(self, arguments: Tree, operation: str = "run", **request: Any) -> dict[str, Any]:
        """Send one request to the child."""
        return self.worker.ask(
            {
                "op": operation,
                "variant": self.claims.key,
                "options": self.options,
                "arguments": arguments,
                "device": self.device,
                "autocast": self.dtype == "bfloat16_autocast",
                **request,
            }
        )

    def must_refuse(self, drawn: Drawn) -> None:
        """Outside its claimed domain a variant must raise ``ValueError``."""
        if self.ask(drawn.arguments, "refuses")["refused"] is None:
            raise Rejection(
                "mismatch",
                f"accepts an input outside the domain it claims ({', '.join(self.claims.conditions)})",
                where=drawn.where,
            )
        self.tally.checks += 1
        self.tally.cases.add(drawn.case.name)

    # --- comparing

    def compare(
        self,
        answer: dict[str, Any],
        expected: Expected,
        drawn: Drawn,
        *,
        key: str = "outputs",
        note: str = "",
        grow: float = 1.0,
    ) -> None:
        """Outputs against their truth; ``Rejection`` at the first one that is not."""
        named = self._named(answer, key)
        missing = [name for name in expected.outputs if name not in named]
        if missing or len(answer[key]) > len(self.operator.outputs):
            raise Rejection(
                "wrong_shape",
                f"returns {len(answer[key])} tensors, the operator {len(self.operator.outputs)}",
                where=drawn.where,
            )
        for name, truth in expected.outputs.items():
            growth = grow * self.growth(name, drawn) * self.operator.tolerance.widening(name)
            self.judged(
                measure(
                    name, named[name], truth, self.operator.tolerance, self.dtype,
                    keep=self.slices(name), circular=name in self.operator.circular, grow=growth,
                ),
                name, drawn, note,
            )  # fmt: skip

    def _named(self, answer: dict[str, Any], key: str) -> dict[str, Any]:
        values = answer.get("inputs", [])
        return self.judge.name_outputs(answer[key], values)

    def slices(self, name: str) -> tuple[int, ...]:
        """The axes of an output (or of ``d<input>``) along which each index is judged by itself."""
        for pattern, axes in self.operator.slices.items():
            if fnmatchcase(name, pattern):
                return axes
        return ()

    def growth(self, name: str, drawn: Drawn) -> float:
        """The factor on c of an output that absorbs tokens: the root of how many."""
        if name not in self.operator.tolerance.grows:
            return 1.0
        return math.sqrt(max(1, drawn.case.sizes.get("C", 1)))

    def judged(self, measured: Measured, name: str, drawn: Drawn, note: str = "") -> None:
        """Count a comparison, or reject it when it is over its budget."""
        where = f"{name}{list(measured.index)}, {drawn.where}{', ' + note if note else ''}"
        self.tally.add(measured, drawn.case.name, where)
        if not measured.used <= 1:
            raise Rejection(
                "mismatch",
                f"{name}{list(measured.index)} is {measured.actual:.9g}, should be {measured.expected:.9g}: "
                f"error {measured.error:.3g} is {measured.used:.3g} times its budget "
                f"({drawn.where}{', ' + note if note else ''})",
                where=where, error=measured.error, used=measured.used,
            )  # fmt: skip

    def compare_grads(
        self, grads: dict[str, Any], expected: dict[str, Any], drawn: Drawn, note: str = "", grow: float = 1.0
    ) -> None:
        """Gradients against their truth; None exactly where the reference gives None."""
        for name, truth in expected.items():
            actual = grads.get(name)
            if truth is None or actual is None:
                # A zero gradient and none mean the same to an optimiser; only a missing non-zero one is wrong.
                value = actual if truth is None else truth.oracle
                if value is not None and bool((value != 0).any()):
                    have, want = ("one", "none") if truth is None else ("none", "one")
                    raise Rejection(
                        "mismatch",
                        f"gradient of {name}: {have} where the reference gives {want} "
                        f"({drawn.where}{', ' + note if note else ''})",
                        where=f"d{name}",
                    )
                continue
            measured = measure(
                f"gradient of {name}",
                actual,
                truth,
                self.operator.tolerance,
                self.dtype,
                keep=self.slices(f"d{name}"),
                grow=grow * self.operator.tolerance.widening(f"d{name}"),
            )
            self.judged(measured, f"gradient of {name}", drawn, note)

    # --- drawn shapes

    def sizes(self) -> st.SearchStrategy[dict[str, int]]:
        """Sizes in the operator's ranges, within the claimed shapes."""
        bounds = {}
        for letter, (low, high) in self.operator.ranges.items():
            claimed = self.claims.shapes.get(letter)
            values = st.integers(low, high)
            if claimed is not None:
                first, last, multiple = max(low, claimed[0]), min(high, claimed[1]), claimed[2]
                values = st.sampled_from(list(range(-(-first // multiple) * multiple, last + 1, multiple)) or [first])
            bounds[letter] = values
        return st.fixed_dictionaries(bounds)

    def for_drawn_shapes(self, holds: Callable[[Drawn, str], None]) -> None:
        """Run ``holds(drawn, layout)`` on drawn sizes, values and layouts; the smallest failure is raised."""
        bases = [case for case in self.operator.cases() if case.kind in ("small", "ragged")]
        if not self.operator.ranges or not bases:
            return
        ended: list[Rejection] = []

        @settings(
            max_examples=self.examples if self.fresh is None else self.fresh,
            derandomize=self.fresh is None,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
            print_blob=False,
            report_multiple_bugs=False,
        )
        @given(st.sampled_from(bases), self.sizes(), st.integers(0, 2**20), st.sampled_from(LAYOUTS))
        def example(base: Case, sizes: dict[str, int], seed: int, layout: str) -> None:
            if ended:  # a process that died or hung is not made to do so again for every shrink
                raise ended[0]
            drawn = self.draw(base.resized(**sizes), seed)
            if self.outside(drawn.arguments) is not None:
                return
            try:
                holds(drawn, layout)
            except Rejection as rejection:
                if rejection.status in ("timed_out", "crashed"):
                    ended.append(rejection)
                raise

        try:
            example()
        except Flaky as error:
            raise Rejection(
                "leaked_state", f"gives different answers to the same input: {str(error).splitlines()[0]}"
            ) from error

    def layout_of(self, drawn: Drawn, layout: str) -> dict[str, str]:
        """The same layout for every floating input; an expanded one (stride 0) keeps its own."""
        return {
            name: layout
            for name, leaf in leaves(drawn.arguments)
            if isinstance(leaf, torch.Tensor)
            and leaf.dtype.is_floating_point
            and not (0 in leaf.stride() and leaf.numel() > 1)
        }


def replaced(arguments: Tree, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tree:
    """The arguments with one leaf changed."""
    changed: Tree = map_leaves(lambda n, leaf: change(leaf) if n == name else leaf, arguments)
    return changed
