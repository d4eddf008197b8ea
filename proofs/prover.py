"""The prover: which proofs are wanted, which are stale, and running them in parallel, one isolated child a variant."""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import InvalidRequirement, Requirement

from proofs.judge import Judge
from proofs.session import Claims, Session
from proofs.worker import Rejection, Worker
from registry import Catalogue, Ledger, Proof, load
from registry.settings import settings
from registry.source import Sources
from registry.static import StaticCatalogue, enumerate_static, version


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a prover run is asked for."""

    device: str = "cpu"
    device_class: str = "cpu"
    plugins: tuple[Path, ...] = ()
    trusted_plugins: tuple[Path, ...] = ()
    limit_s: float = 60.0
    examples: int = 20
    fresh: int | None = None
    long: bool = False
    real: bool = True


@dataclass(frozen=True)
class Item:
    """One variant at one set of options: the properties to prove."""

    claims: Claims
    options: dict[str, int]
    properties: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Items that share an operator and a dtype, hence inputs and truths."""

    operator: str
    dtype: str
    items: list[Item] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(item.properties) for item in self.items)


def sources_for(plugins: Iterable[Path]) -> Sources:
    """The checkout's sources and the plug-in files under the module names they are loaded as."""
    return Sources(files={f"plugin_{path.stem}": path for path in plugins})


def claims_of(plan: Plan, *, only_plugins: bool) -> list[Claims]:
    """What the variants declare, read from a child that loads them; a plug-in is never imported here."""
    with Worker(plan.plugins, plan.limit_s) as worker:
        worker.start()
        entries = worker.listing
    modules = {f"plugin_{path.stem}" for path in plan.plugins}
    return [_claims(entry) for entry in entries if not only_plugins or entry["module"] in modules]


def _claims(entry: dict[str, Any]) -> Claims:
    tuples = {name: tuple(entry[name]) for name in ("devices", "dtypes", "conditions", "requires")}
    return Claims(**{**entry, **tuples})


def groups(
    catalogue: Catalogue,
    chosen: Sequence[Claims],
    dtypes: Sequence[str],
    stale: Callable[[Claims, dict[str, int], str, str], bool],
) -> list[Group]:
    """The work by operator and dtype, less what is proven already; the longest first."""
    found: dict[tuple[str, str], Group] = {}
    for claims in chosen:
        declared = catalogue.operator(claims.operator).properties
        for dtype in dtypes:
            if dtype not in claims.dtypes:
                continue
            for options in claims.option_sets():
                wanted = tuple(p for p in claims.properties(declared, dtype) if stale(claims, options, p, dtype))
                if wanted:
                    group = found.setdefault((claims.operator, dtype), Group(claims.operator, dtype))
                    group.items.append(Item(claims, options, wanted))
    order = {name: rank for rank, name in enumerate(("block", "moe", "attention", "cross_entropy"))}
    return sorted(found.values(), key=lambda g: (order.get(g.operator, 9), g.dtype))


def missing_requirement(claims: Claims) -> str | None:
    """Why the variant cannot run here, or None: a requirement that is not installed or of another version."""
    for text in claims.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            return f"requirement {text!r} is malformed: {error}"
        installed = version(requirement.name)
        if installed == "absent":
            return f"requires {text}, which is not installed"
        if not requirement.specifier.contains(installed, prereleases=True):
            return f"requires {text}, installed is {installed}"
    return None


def prove_group(plan: Plan, group: Group, done: Callable[[Proof], None]) -> list[Proof]:
    """Prove every item of a group in this process, its variants each in their own child."""
    catalogue = load(plugins=plan.trusted_plugins)
    judge = Judge(catalogue, group.operator, group.dtype, plan.device)
    static = enumerate_static(sources_for(plan.plugins))
    proofs = []
    for item in group.items:
        reason = missing_requirement(item.claims) or _not_here(item.claims, plan.device)
        with Worker(plan.plugins, plan.limit_s) as worker:
            for name in item.properties:
                started = time.perf_counter()
                session = Session(
                    judge,
                    worker,
                    item.claims,
                    item.options,
                    examples=plan.examples,
                    fresh=plan.fresh,
                    long=plan.long,
                    real=plan.real,
                )
                outcome = ("skipped", reason, "", None, None) if reason else judged(name, session)
                proof = _proof(plan, static, session, name, outcome, time.perf_counter() - started)
                proofs.append(proof)
                done(proof)
    return proofs


def _not_here(claims: Claims, device: str) -> str | None:
    kind = device.partition(":")[0]
    return None if kind in claims.devices else f"claims devices {', '.join(claims.devices)}, not {kind}"


Outcome = tuple[str, str, str, float | None, float | None]


def judged(name: str, session: Session) -> Outcome:
    """Run one property's check: status, message, where, error, budget used."""
    module = importlib.import_module(f"{settings().properties}.{name}")
    try:
        module.check(session)
    except Rejection as rejection:
        return rejection.status, rejection.message, rejection.where, rejection.error, rejection.used
    tally = session.tally
    if not tally.checks:
        return "skipped", f"no case of {session.operator.name} applies", "", None, None
    return "passed", "", tally.where, tally.worst_error, tally.budget_used


def _proof(
    plan: Plan, static: StaticCatalogue, session: Session, name: str, outcome: Outcome, duration_s: float
) -> Proof:
    status, message, where, error, used = outcome
    tally, claims = session.tally, session.claims
    known = static.variants.get(claims.key)
    return Proof(
        operator=claims.operator,
        variant=claims.name,
        options=session.options,
        property=name,
        dtype=session.dtype,
        device_class=plan.device_class,
        status=status,
        message=message,
        where=where,
        worst_error=error,
        budget_used=used,
        cases=len(tally.cases),
        checks=tally.checks,
        redrawn=tally.redrawn,
        details=tally.details,
        fingerprint=static.fingerprint(known, name) if known is not None else {},
        duration_s=round(duration_s, 3),
    )


def run(
    plan: Plan,
    work: Sequence[Group],
    jobs: int,
    done: Callable[[Proof], None],
    keep: Callable[[list[Proof]], None],
) -> list[Proof]:
    """Prove all groups, ``jobs`` at a time in processes of their own.

    ``done`` sees each verdict, ``keep`` the verdicts of each finished group, so that an interrupted run loses little.
    """
    proofs: list[Proof] = []
    if jobs <= 1 or len(work) <= 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for group in work:
                proofs += _kept(prove_group(plan, group, done), keep)
        finally:
            torch.set_num_threads(threads)
        return proofs
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        max_workers=jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        futures = [pool.submit(prove_group, plan, group, _silent) for group in work]
        for future in as_completed(futures):
            for proof in _kept(future.result(), keep):
                proofs.append(proof)
                done(proof)
    return proofs


def _kept(found: list[Proof], keep: Callable[[list[Proof]], None]) -> list[Proof]:
    keep(found)
    return found


def _silent(_: Proof) -> None:
    """Verdicts of a worker process are told when its group is done."""


def is_stale(
    static: StaticCatalogue, ledger: Ledger, device_class: str
) -> Callable[[Claims, dict[str, int], str, str], bool]:
    """Whether a built-in variant's property still has to be proven."""

    def stale(claims: Claims, options: dict[str, int], name: str, dtype: str) -> bool:
        return ledger.gap(static, static.variants[claims.key], name, dtype, device_class, options) is not None

    return stale
