"""From a recipe to callables, and only to proven ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from registry.catalogue import Bound, Catalogue, load
from registry.declare import DTYPES
from registry.ledger import Gap, Ledger
from registry.recipe import Recipe, load_recipe
from registry.records import Proof
from registry.static import StaticCatalogue, StaticVariant, enumerate_static


class UnprovenVariantError(ValueError):
    """A recipe names a variant whose proofs are missing or stale; the message says which, why and the remedy."""


@dataclass(frozen=True)
class Resolved(Mapping[str, Bound]):
    """Operator name to proven callable."""

    name: str
    device: str
    dtype: str
    bound: Mapping[str, Bound]
    proofs: tuple[Proof, ...]

    def __getitem__(self, operator: str) -> Bound:
        return self.bound[operator]

    def __iter__(self) -> Iterator[str]:
        return iter(self.bound)

    def __len__(self) -> int:
        return len(self.bound)


def device_class(device: Any) -> str:
    """``cpu`` or ``cuda:sm_90``; ``ValueError`` for a device that is not there."""
    name = str(device)
    if name == "cpu":
        return "cpu"
    if not name.startswith("cuda"):
        raise ValueError(f"device {name!r} is not cpu or cuda[:N]")
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            f"no CUDA device here for --device {name}; use --device cpu, or a machine and a torch build with CUDA"
        )
    index = name.partition(":")[2]
    count = torch.cuda.device_count()
    if index and (not index.isdigit() or int(index) >= count):
        raise ValueError(f"no device {name}: this machine has {count} (cuda:0 to cuda:{count - 1})")
    major, minor = torch.cuda.get_device_capability(int(index) if index else None)
    return f"cuda:sm_{major}{minor}"


def resolve(
    recipe: Recipe | str,
    device: Any = "cpu",
    dtype: str = "float32",
    catalogue: Catalogue | None = None,
    ledger: Ledger | None = None,
) -> Resolved:
    """The recipe's callables for a device and dtype, every one proven there.

    Raises ``UnprovenVariantError`` naming the first variant that is not, the property, what changed and
    the command that proves it.
    """
    static = enumerate_static()
    recipe = load_recipe(recipe, static) if isinstance(recipe, str) else recipe
    catalogue = load() if catalogue is None else catalogue
    ledger = Ledger() if ledger is None else ledger
    check_dtype(dtype)
    where = device_class(device)
    bound: dict[str, Bound] = {}
    for operator, name in recipe.variants.items():
        options = recipe.options.get(operator, {})
        variant = static.variants[f"{operator}/{name}"]
        gaps = ledger.gaps(variant, where, dtype, static)
        if gaps and recipe.auto:
            variant = static.variants[f"{operator}/{static.operators[operator].reference}"]
            options = {}
            gaps = ledger.gaps(variant, where, dtype, static)
        if gaps:
            raise UnprovenVariantError(refusal(variant, gaps, str(device), dtype, ledger))
        bound[operator] = catalogue.bind(variant.key, **options)
    return Resolved(recipe.name, where, dtype, bound, tuple(proofs_used(bound, ledger, where, dtype, static)))


def check_dtype(dtype: str) -> None:
    """``ValueError`` unless the dtype is spelled as DESIGN spells it."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")


def refusal(variant: StaticVariant, gaps: list[Gap], device: str, dtype: str, ledger: Ledger) -> str:
    """One line: the variant, the property, what is missing or changed, and the command that proves it."""
    more = f" (and {len(gaps) - 1} more)" if len(gaps) > 1 else ""
    remedy = command(variant, device, dtype, ledger)
    return f"{variant.key} is not proven on {device} {dtype}: {gaps[0]}{more}; prove it with: {remedy}"


def command(variant: StaticVariant, device: str, dtype: str, ledger: Ledger) -> str:
    """The command line that proves a variant where it is to run."""
    default = Ledger().folder.resolve() == ledger.folder.resolve()
    target = "" if default else f" --ledger {ledger.folder}"
    # Under autocast the float32 proofs count too, so both are named by leaving the dtype to the default.
    chosen = "" if dtype == "bfloat16_autocast" else f" --dtype {dtype}"
    where = device.partition(":")[0]
    return f"python -m proofs --operator {variant.operator} --variant {variant.name} --device {where}{chosen}{target}"


def proofs_used(
    bound: Mapping[str, Bound], ledger: Ledger, where: str, dtype: str, static: StaticCatalogue
) -> Iterator[Proof]:
    """The records that a resolved recipe stands on."""
    for operator, each in bound.items():
        needed = {(d, p) for d in ("float32", dtype) for p in static.required(static.variants[each.variant.key], d)}
        if dtype != "bfloat16_autocast":
            needed = {(d, p) for d, p in needed if d == dtype}
        for proof in ledger.records(operator).values():
            if (
                proof.variant == each.variant.name
                and proof.device_class == where
                and (proof.dtype, proof.property) in needed
            ):
                yield proof
