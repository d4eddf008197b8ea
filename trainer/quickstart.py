"""Quickstart: real text to shards, proofs of the recipe, a few hundred steps, and a table of what happened."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import registry
from registry import Proof
from trainer import corpus, metrics
from trainer.configuration import RunConfiguration, configure
from trainer.errors import TrainingError

TEXT_BYTES = 3_000_000
STEPS = 200
# A small engine at its start bears a far larger step than the production run's.
SETTINGS = {"size": "tiny", "recipe": "production", "device": "cpu", "steps": STEPS, "batch": 4, "seq": 24, "lr": 0.2}


PLACE = ["--device", "cpu", "--dtype", "float32"]


def quickstart(out: Path) -> int:
    """Do all of it under ``out``; run again, finished parts are kept and training goes on where it stopped."""
    console = Console()
    shards = out / "shards"
    if not (shards / corpus.MANIFEST).is_file():
        console.rule("1 of 3: the standard library's text to two shards")
        started_s = time.perf_counter()
        manifest = corpus.tokenize(standard_library(TEXT_BYTES), shards, 2)
        elapsed_s = time.perf_counter() - started_s
        console.print(f"{manifest['documents']} documents, {manifest['total_tokens']:,} tokens in {elapsed_s:.1f} s")
    console.rule("2 of 3: proofs of the production recipe on this machine")
    prove(out / "ledger")
    console.rule("3 of 3: training with the proven variants")
    configuration = configure(
        {**SETTINGS, "shard": shards / "shard_0.npy", "out": out / "run", "ledger": out / "ledger"}
    )
    verdict = train(configuration)
    if verdict == 0:
        report(console, configuration, out)
    return verdict


def standard_library(limit_bytes: int) -> list[Path]:
    """``pydoc_data``'s topics, then the standard library's top-level modules in sorted order up to the limit."""
    root = Path(sysconfig.get_path("stdlib"))
    chosen, size_bytes = [], 0
    for path in [root / "pydoc_data" / "topics.py", *sorted(root.glob("*.py"))]:
        size_bytes += path.stat().st_size
        if size_bytes > limit_bytes:
            break
        chosen.append(path)
    return chosen


def prove(ledger: Path) -> None:
    """Prove the recipe's variants into ``ledger``; ``TrainingError`` when a proof fails."""
    command = [sys.executable, "-m", "proofs", "--recipe", "production", *PLACE, "--ledger", str(ledger)]
    if subprocess.run(command, check=False).returncode:
        raise TrainingError(f"a proof failed, so nothing was trained; see above, or run: {' '.join(command[1:])}")


def train(configuration: RunConfiguration) -> int:
    """Train; the exit code of the run."""
    from trainer.loop import run

    return run(configuration)


def report(console: Console, configuration: RunConfiguration, out: Path) -> None:
    """Print what was trained, on which proofs, and where to look next."""
    import torch

    from trainer.checks import resolve

    lines = metrics.read(configuration.folder / "metrics.jsonl")
    console.print(training_table(lines))
    console.print(proof_table(resolve(configuration, torch.device("cpu"))))
    console.print(
        f"Checkpoint and metrics: {configuration.folder}. Go on with:\n"
        f"  python -m registry list\n"
        f"  python -m registry why attention/chunked\n"
        f"  python -m trainer data inspect {out / 'shards' / 'shard_1.npy'} --at 1000\n"
        f"  python -m trainer run --shard {out / 'shards' / 'shard_1.npy'} --out {out / 'second'} --size tiny "
        f"--lr {configuration.lr} --device cpu --ledger {out / 'ledger'}",
        soft_wrap=True,
    )


def training_table(lines: Sequence[dict[str, Any]]) -> Table:
    """Losses at the first and last step, speed and tokens."""
    table = Table(title=f"{len(lines)} steps, {lines[-1]['token']:,} tokens of text")
    for column in ("", "first", "last"):
        table.add_column(column, justify="right" if column else "left")
    sampled = [line for line in lines if line["ss"] is not None]
    for name, rows in (("ema_tf", lines), ("tf", lines), ("ema_ss", sampled), ("lb", lines)):
        if rows:
            table.add_row(name, f"{rows[0][name]:.3f}", f"{rows[-1][name]:.3f}")
    speeds = sorted(line["tokens_per_s"] for line in lines if line["tokens_per_s"] is not None)
    table.add_row("tok/s (median)", "", f"{speeds[len(speeds) // 2]:,.0f}")
    return table


def proof_table(operators: registry.Resolved) -> Table:
    """The proofs that the run stood on, a row a variant: properties, dtype, the most of its budget that any used."""
    table = Table(title="proofs used")
    for column in ("variant", "dtype", "properties", "worst budget used"):
        table.add_column(column)
    by_variant: dict[tuple[str, str], list[Proof]] = {}
    for proof in operators.proofs:
        by_variant.setdefault((f"{proof.operator}/{proof.variant}", proof.dtype), []).append(proof)
    for (variant, dtype), proofs in sorted(by_variant.items()):
        budgets = [proof.budget_used for proof in proofs if proof.budget_used is not None]
        properties = ", ".join(sorted({proof.property for proof in proofs}))
        table.add_row(variant, dtype, properties, f"{max(budgets):.2f}" if budgets else "exact")
    return table
