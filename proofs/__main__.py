"""``python -m proofs``: prove variants, recipes and plug-in files.

Exit 0 all proven, 1 a verdict against, 2 bad usage.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from proofs import explain, matrix, prover, recipes, reproduce
from proofs.session import Claims
from proofs.worker import Rejection
from registry import DTYPES, PROPERTIES, Catalogue, Ledger, Proof, load, long
from registry.catalogue import unknown
from registry.recipe import load_recipe
from registry.records import document
from registry.resolve import device_class
from registry.settings import ROOT
from registry.static import enumerate_static


def parser() -> argparse.ArgumentParser:
    """The command line, with DESIGN's fixed options."""
    found = argparse.ArgumentParser(prog="python -m proofs", description=__doc__)
    add = found.add_argument
    add("--operator", default="*", help="glob over operators")
    add("--variant", default="*", help="glob over variants")
    add("--property", default="*", help="glob over properties")
    add("--recipe", help="prove a recipe: its variants, then the whole engine against the reference recipe")
    add("--dtype", choices=DTYPES, help="one dtype (default: all that are claimed)")
    add("--device", default="cpu", help="cpu or cuda[:N]")
    add(
        "--plugin", type=Path, help="a Python file whose decorated functions are variants or operators; its code is run"
    )
    add("--json", type=Path, metavar="OUT", help="write the verdicts as one JSON object")
    add("--all", action="store_true", help="prove again what is proven already")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (default: one a core)")
    add("--ledger", type=Path, metavar="DIR", help="where proofs are kept (default: the checkout's)")
    add("--limit", type=float, default=60.0, metavar="S", help="seconds that one request to a variant may take")
    add(
        "--fresh",
        type=int,
        metavar="N",
        help="N newly drawn hypothesis examples instead of the fixed ones; nothing is recorded",
    )
    add(
        "--long",
        action="store_true",
        help="chain 10,000 chunks, plot the drift to drift/*.svg and keep it beside the ledger; no proof is recorded",
    )
    add("--no-real", action="store_true", help="leave out the 1B-shape cases; nothing is recorded")
    add("--explain", action="store_true", help="what each property guarantees and what it does not")
    add(
        "--adversaries",
        action="store_true",
        help="run the prover against wrong and right adversaries and write the kill matrix",
    )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    arguments = parser().parse_args(argv)
    if arguments.explain:
        print(explain.text())
        return 0
    try:
        return _run(arguments)
    except Rejection as rejection:
        print(f"proofs: {rejection.status}: {rejection.message}", file=sys.stderr)
        return 2 if rejection.status == "crashed" and "exit code 1:" in rejection.message else 1
    except ValueError as error:
        print(f"proofs: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    if arguments.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, not {arguments.jobs}")
    if not fnmatch.filter(PROPERTIES, arguments.property):
        raise unknown("property", arguments.property, PROPERTIES)
    where = device_class(arguments.device)
    if arguments.long:
        _require_plots()
    if arguments.adversaries:
        folder = arguments.ledger or Ledger().folder
        return matrix.run(arguments.jobs, arguments.operator, arguments.variant, folder, every=arguments.all)
    if arguments.recipe is not None:
        return _recipe(arguments, where)
    if arguments.plugin is not None:
        return _plugin(arguments, where)
    plan = _plan(arguments, where)
    catalogue = load()
    chosen = _select(catalogue, prover.claims_of(plan, only_plugins=False), arguments)
    proofs = _prove(plan, catalogue, chosen, arguments)
    return _finish(proofs, arguments)


def _require_plots() -> None:
    """Said before the hours of a long run, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the drift is plotted with matplotlib: pip install matplotlib")


def _plan(
    arguments: argparse.Namespace, where: str, plugins: tuple[Path, ...] = (), trusted: tuple[Path, ...] = ()
) -> prover.Plan:
    return prover.Plan(
        device=arguments.device,
        device_class=where,
        plugins=plugins,
        trusted_plugins=trusted,
        limit_s=arguments.limit,
        fresh=arguments.fresh,
        long=arguments.long,
        real=not arguments.no_real,
    )


def _select(catalogue: Catalogue, claims: list[Claims], arguments: argparse.Namespace) -> list[Claims]:
    operators = {c.operator for c in claims}
    if not fnmatch.filter(operators, arguments.operator):
        raise unknown("operator", arguments.operator, {*catalogue.operators, *operators})
    of = [c for c in claims if fnmatch.fnmatchcase(c.operator, arguments.operator)]
    chosen = [c for c in of if fnmatch.fnmatchcase(c.name, arguments.variant)]
    if not chosen:
        raise unknown("variant", arguments.variant, {c.name for c in of})
    return chosen


def _prove(plan: prover.Plan, catalogue: Catalogue, chosen: list[Claims], arguments: argparse.Namespace) -> list[Proof]:
    """Prove what is stale (or everything), write the ledger unless a plug-in or an exploration, show progress."""
    ledger = Ledger(arguments.ledger)
    recorded = not plan.plugins and arguments.fresh is None and not (arguments.long or arguments.no_real)
    stale = prover.is_stale(enumerate_static(), ledger, plan.device_class)
    dtypes = [arguments.dtype] if arguments.dtype else list(DTYPES)

    def wanted(claims: Claims, options: dict[str, int], name: str, dtype: str) -> bool:
        return fnmatch.fnmatchcase(name, arguments.property) and (
            arguments.all or not recorded or stale(claims, options, name, dtype)
        )

    work = prover.groups(catalogue, chosen, dtypes, wanted)
    proofs = []
    with tqdm(total=sum(len(group) for group in work), unit="proof", disable=not sys.stderr.isatty()) as bar:

        def done(proof: Proof) -> None:
            bar.update()
            bar.set_postfix_str(proof.label)
            if proof.status not in ("passed", "skipped"):
                tqdm.write(describe(proof), file=sys.stdout)

        proofs = prover.run(plan, work, arguments.jobs, done, ledger.write if recorded else _forget)
    if not proofs:
        print("everything asked for is proven already (--all proves it again)")
    return proofs


def _forget(_: list[Proof]) -> None:
    """Plug-ins and explorations are not recorded."""


def describe(proof: Proof) -> str:
    """A verdict in a line, and how to reproduce one against."""
    options = "".join(f" {k}={v}" for k, v in proof.options.items())
    line = f"{proof.operator}/{proof.variant}{options} {proof.dtype} {proof.property}: {proof.status}"
    if proof.status == "passed":
        return f"{line} (budget used {proof.budget_used:.3f}, {proof.checks} checks)"
    return f"{line}: {proof.message}" + reproduce.snippet(proof)


def _finish(proofs: list[Proof], arguments: argparse.Namespace, extra: list[Proof] | None = None) -> int:
    everything = [*proofs, *(extra or [])]
    if arguments.long:
        _drift(everything, Ledger(arguments.ledger).folder)
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps(document([p.to_json() for p in everything]), indent=1) + "\n", encoding="utf-8"
        )
    _table(everything)
    against = [p for p in everything if p.status not in ("passed", "skipped")]
    skipped = [p for p in everything if p.status == "skipped"]
    for variant, message in sorted({(f"{p.operator}/{p.variant}", p.message) for p in skipped}):
        print(f"skipped {variant}: {message}")
    if against or (skipped and arguments.plugin is not None):
        return 1
    return 0


def _drift(proofs: list[Proof], ledger: Path) -> None:
    kept = long.keep(proofs, ledger)
    if kept is not None:
        print(f"long chains: {kept}", flush=True)
        plot = [sys.executable, "-m", "reports", "drift", "--ledger", str(ledger.resolve()), "--out"]
        subprocess.run([*plot, str(Path("drift").resolve())], check=False, cwd=ROOT)


def _table(proofs: list[Proof]) -> None:
    rows: dict[tuple[str, str], list[Proof]] = {}
    for proof in proofs:
        rows.setdefault((f"{proof.operator}/{proof.variant}", proof.dtype), []).append(proof)
    for (variant, dtype), group in sorted(rows.items()):
        passed = [p for p in group if p.status == "passed"]
        used = max((p.budget_used or 0.0 for p in passed), default=0.0)
        seconds = sum(p.duration_s or 0.0 for p in group)
        print(
            f"{variant:36} {dtype:18} {len(passed):3d}/{len(group):<3d} passed  "
            f"budget used {used:5.3f}  {seconds:6.1f} s"
        )


def _plugin(arguments: argparse.Namespace, where: str) -> int:
    path = arguments.plugin.resolve()
    if not path.is_file():
        raise ValueError(f"no plug-in file {arguments.plugin}")
    static = enumerate_static(prover.sources_for([path]))
    module = f"plugin_{path.stem}"
    # An operator of the plug-in's own is its judge, so that file is imported here too; a variant's never is.
    trusted = (path,) if any(o.module == module for o in static.operators.values()) else ()
    catalogue = load(plugins=trusted)
    plan = _plan(arguments, where, (path,), trusted)
    claims = prover.claims_of(plan, only_plugins=True)
    if not claims:
        raise ValueError(
            f"{arguments.plugin} declares no variant: "
            "decorate a function with @registry.variant(operator=..., name=...)"
        )
    return _finish(_prove(plan, catalogue, _select(catalogue, claims, arguments), arguments), arguments)


def _recipe(arguments: argparse.Namespace, where: str) -> int:
    recipe = load_recipe(arguments.recipe)
    plan = _plan(arguments, where)
    keys = {f"{o}/{v}" for o, v in recipe.variants.items()}
    catalogue = load()
    chosen = [c for c in prover.claims_of(plan, only_plugins=False) if c.key in keys]
    proofs = _prove(plan, catalogue, _select(catalogue, chosen, arguments), arguments)
    dtypes = [arguments.dtype] if arguments.dtype else ["float32", "float64"]
    whole: list[Any] = recipes.prove(
        recipe, catalogue, arguments.device, where, [d for d in dtypes if d != "bfloat16_autocast"]
    )
    if arguments.fresh is None and not (arguments.long or arguments.no_real):
        Ledger(arguments.ledger).write(whole)
    for proof in whole:
        print(describe(proof))
    return _finish(proofs, arguments, whole)


if __name__ == "__main__":
    sys.exit(main())
