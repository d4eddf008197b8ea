"""A failing proof again, alone: the snippet that a verdict prints, and what it runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from proofs import prover
from proofs.judge import Judge
from proofs.session import Session
from proofs.worker import Worker
from registry import Proof, load
from registry.static import enumerate_static


def snippet(proof: Proof) -> str:
    """A command that runs the failing property of the variant again."""
    if proof.operator == "recipe" or proof.status == "skipped":
        return ""
    arguments = [f"{proof.operator}/{proof.variant}", f"property={proof.property!r}", f"dtype={proof.dtype!r}"]
    if proof.options:
        arguments.append(f"options={dict(proof.options)!r}")
    case = re.search(r"case ([^ ]+) \(([^)]*)\), seed (\d+)", proof.where or proof.message)
    if case and proof.property == "forward":
        sizes = dict(part.split("=") for part in case[2].split(","))
        arguments += [f"case={case[1]!r}", f"sizes={ {k: int(v) for k, v in sizes.items()}!r}", f"seed={case[3]}"]
    call = ", ".join([repr(arguments[0]), *arguments[1:]])
    line = f'python -c "from proofs.reproduce import reproduce; reproduce({call})"'
    return f'\n    reproduce: {line}  # plugin="FILE.py" for a plug-in'


def reproduce(
    variant: str,
    *,
    property: str = "forward",
    dtype: str = "float32",
    options: dict[str, int] | None = None,
    case: str | None = None,
    sizes: dict[str, int] | None = None,
    seed: int = 0,
    plugin: str | None = None,
    device: str = "cpu",
) -> None:
    """Judge one property again, or (with ``case``) compare one call, and print the verdict."""
    plugins = (Path(plugin).resolve(),) if plugin else ()
    static = enumerate_static(prover.sources_for(plugins))
    trusted = plugins if any(o.module.startswith("plugin_") for o in static.operators.values()) else ()
    plan = prover.Plan(device=device, plugins=plugins, trusted_plugins=trusted)
    catalogue = load(plugins=trusted)
    claims = next((c for c in prover.claims_of(plan, only_plugins=False) if c.key == variant), None)
    if claims is None:
        raise ValueError(f"no variant {variant!r}{'' if plugin else '; name the file with plugin=...'}")
    judge = Judge(catalogue, claims.operator, dtype, device)
    with Worker(plugins) as worker:
        session = Session(judge, worker, claims, options or claims.option_sets()[0])
        if case is None:
            status, message, *_ = prover.judged(property, session)
            print(f"{variant} {property}: {status} {message}")
            return
        base = next(c for c in judge.operator.cases() if c.name == case.partition("[")[0])
        chosen = (
            base
            if base.name == case
            else base.resized(**{k: v for k, v in (sizes or {}).items() if k in judge.operator.ranges})
        )
        drawn = session.draw(chosen, seed)
        session.compare(session.ask(drawn.arguments), judge.expected(drawn), drawn)
        print(f"{variant} {drawn.where}: within budget, {session.tally.budget_used:.3f} used", file=sys.stdout)
