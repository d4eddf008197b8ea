"""The suites by name: which tables of cells each consists of, found by enumeration and sized by the profile."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.profiles import Profile, Shape
from benchmarks.spec import Cell, Table
from registry import Catalogue, Operator, Recipe, load_recipe
from registry.catalogue import unknown

PARTS_OF_STEP = ("forward", "backward", "clip", "optimizer_step")
PARTS_OF_FORWARD = ("attention", "kuramoto", "moe", "embedding_norms", "head")
OPERATORS = ("attention", "cross_entropy", "moe", "sampler", "block", "optimizer_step")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run was asked for: everything a suite's cells have in common."""

    catalogue: Catalogue
    profile: Profile
    recipe: str = "production"
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    plugins: tuple[str, ...] = ()
    ledger: str | None = None
    shard: str = ""

    def cell(self, **fields: Any) -> Cell:
        """A cell with what the plan says for all."""
        common = {"device": self.device, "dtype": self.dtype, "threads": self.threads, "plugins": self.plugins}
        limits = {
            "budget_s": self.profile.budget_s,
            "turns": self.profile.turns,
            "limit_s": self.profile.limit_s,
            "ledger": self.ledger,
        }
        return Cell(**{**common, **limits, **fields})

    def compared(self, cells: list[Cell], rounds: int, *, together: bool = True) -> Table:
        """A table whose first cell is the reference, its null row put second."""
        return Table((cells[0], replace(cells[0], null=True), *cells[1:]), rounds, together=together)

    @property
    def recipes(self) -> tuple[str, ...]:
        """The reference recipe and the one asked for."""
        return tuple(dict.fromkeys(("reference", self.recipe)))


def operator_suite(operator: str, plan: Plan) -> list[Table]:
    """One table a shape and mode, a row a variant; a block runs with the recipe's attention and experts inside."""
    tables = []
    for shape in plan.profile.operators.get(operator) or own_shapes(plan.catalogue.operator(operator)):
        for mode in shape.modes:
            cells = [_variant(plan, operator, variant.name, shape, mode) for variant in plan.catalogue.of(operator)]
            tables.append(plan.compared(cells, shape.rounds))
    return tables


def own_shapes(operator: Operator) -> tuple[Shape, ...]:
    """What is measured of an operator that no profile knows, a plug-in's: its real cases, else its first one."""
    cases = operator.cases()
    chosen = [case for case in cases if case.kind == "real"] or list(cases[:1])
    modes = ("forward", "forward_backward") if operator.differentiable else ("forward",)
    return tuple(Shape(case=c.name, axes=c.sizes, values=c.values, rounds=3, modes=modes) for c in chosen)


def _variant(plan: Plan, operator: str, name: str, shape: Shape, mode: str) -> Cell:
    return plan.cell(
        suite=operator,
        kind="operator",
        operator=operator,
        variant=name,
        options=plan.catalogue.variant(f"{operator}/{name}").defaults(),
        case=shape.case,
        axes=shape.axes,
        values=shape.values,
        mode=mode,
        recipe=plan.recipe if operator == "block" else None,
        **({"turns": shape.turns} if shape.turns else {}),
    )


def data_fetch(plan: Plan) -> list[Table]:
    """One table a number of processes; what is known not to fit in memory is refused before it starts."""
    tables = []
    for processes in plan.profile.fetch_processes:
        axes = {"P": processes, "B": 8, "T": 128, "L": plan.profile.fetch_tokens}
        cells = [
            plan.cell(
                suite="data_fetch",
                kind="fetch",
                operator="data_fetch",
                variant=variant.name,
                case="shard",
                axes=axes,
                mode="forward",
                device="cpu",
                dtype="float32",
                # The reference is known to copy the shard to int64 in every process, and once more to be checked.
                need_bytes=8 * axes["L"] * (processes + 1) if variant.name == "upcast" else 0,
                extras={"shard": plan.shard},
            )
            for variant in plan.catalogue.of("data_fetch")
        ]
        # Not together: pages of the shard that several rows hold would count a part for each.
        tables.append(plan.compared(cells, max(2, plan.profile.small_rounds), together=False))
    return tables


def _engine(plan: Plan, suite: str, recipe: str, axes: Mapping[str, int], **fields: Any) -> Cell:
    given: dict[str, Any] = {
        "kind": "engine",
        "operator": "engine",
        "variant": recipe,
        "case": "step",
        "mode": "step",
        "recipe": recipe,
    }
    return plan.cell(suite=suite, axes=axes, **{**given, "extras": {"sizes": plan.profile.engine}, **fields})


def engine(plan: Plan) -> list[Table]:
    """Training steps end to end, a row a recipe."""
    profile = plan.profile
    cells = [
        _engine(plan, "engine", recipe, profile.engine_axes, turns=profile.engine_steps, pinned=True)
        for recipe in plan.recipes
    ]
    return [plan.compared(cells, profile.engine_rounds)]


def engine_1b(plan: Plan) -> list[Table]:
    """The whole 1B configuration, a table a batch; without a null row, which would cost as much as all else."""
    from benchmarks.profiles import ENGINE_1B

    batches = sorted({B for each in plan.profile.engine_1b.values() for B in each})
    tables = []
    for B in batches:
        recipes = [
            r
            for r in plan.recipes
            if B in plan.profile.engine_1b.get("reference" if r == "reference" else "production", ())
        ]
        extras = {"sizes": ENGINE_1B, "check_steps": 1}
        cells = [
            _engine(plan, "engine_1b", r, {"B": B, "C": 128}, turns=3, pinned=True, limit_s=1800, extras=extras)
            for r in recipes
        ]
        tables.append(Table(tuple(cells), 1, checked=len(cells) > 1, together=False))
    return tables


def trainer(plan: Plan) -> list[Table]:
    """The trainer's own command with its scheduled-sampling branch, a row a recipe."""
    steps = plan.profile.trainer_steps
    extras = {"sizes": plan.profile.engine, "steps": steps}
    cells = [
        _engine(plan, "trainer", recipe, plan.profile.engine_axes, kind="trainer", operator="trainer", extras=extras)
        for recipe in plan.recipes
    ]
    return [Table(tuple(cells), plan.profile.small_rounds, checked=False, together=False)]


def scaling(plan: Plan) -> list[Table]:
    """The recipe at growing batches, in the same rounds."""
    C = plan.profile.engine_axes["C"]
    cells = [
        _engine(plan, "scaling", plan.recipe, {"B": B, "C": C}, turns=min(5, plan.profile.engine_steps), pinned=True)
        for B in plan.profile.scaling
    ]
    return [Table(tuple(cells), plan.profile.small_rounds, checked=False, compared=False)]


def breakdown(plan: Plan) -> list[Table]:
    """A step by its parts, then the forward pass by its components, each measured alone."""
    extras = {"sizes": plan.profile.breakdown}
    cells = [
        _engine(
            plan,
            "breakdown",
            plan.recipe,
            plan.profile.breakdown_axes,
            kind="part",
            operator=part,
            case=case,
            extras=extras,
        )
        for case, parts in (("step", PARTS_OF_STEP), ("forward", PARTS_OF_FORWARD))
        for part in parts
    ]
    return [Table(tuple(cells), plan.profile.small_rounds, checked=False, compared=False)]


def cumulative(plan: Plan) -> list[Table]:
    """The reference recipe, then one of the recipe's variants added a row, in the recipe's order."""
    cells = [
        _engine(
            plan,
            "cumulative",
            spec,
            plan.profile.engine_axes,
            turns=max(3, plan.profile.engine_steps // 2),
            pinned=True,
            extras={"sizes": plan.profile.engine, "check_steps": 1},
        )
        for spec in stack(plan.recipe)
    ]
    return [plan.compared(cells, plan.profile.small_rounds)]


def stack(recipe: str) -> list[str]:
    """``reference``, then one override more each, to all that the recipe changes but the loop's own operators."""
    wanted: Recipe = load_recipe(recipe)
    base = load_recipe("reference")
    specs = ["reference"]
    for operator, variant in wanted.variants.items():
        if operator not in ("data_fetch", "sampler") and base.variants[operator] != variant:
            options = "".join(f":{k}={v}" for k, v in sorted(wanted.options.get(operator, {}).items()))
            specs.append(f"{specs[-1]},{operator}={variant}{options}")
    return specs


Suite = Callable[[Plan], list[Table]]
SUITES: dict[str, Suite] = {
    **{name: functools.partial(operator_suite, name) for name in OPERATORS},
    "data_fetch": data_fetch,
    "engine": engine,
    "engine_1b": engine_1b,
    "trainer": trainer,
    "scaling": scaling,
    "breakdown": breakdown,
    "cumulative": cumulative,
}


def select(pattern: str, catalogue: Catalogue) -> dict[str, Suite]:
    """The suites that a glob names, a plug-in's operators among them; none is an error with the nearest name."""
    own = [name for name in catalogue.operators if name not in SUITES]
    known: dict[str, Suite] = {**SUITES, **{name: functools.partial(operator_suite, name) for name in own}}
    found = {name: suite for name, suite in known.items() if fnmatch.fnmatchcase(name, pattern)}
    if not found:
        raise unknown("suite", pattern, known)
    return found
