"""``python -m benchmarks``: measure suites of cells, a process each, and write their records."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from tqdm import tqdm

from benchmarks import fetch, memory, runner
from benchmarks.kept import Kept
from benchmarks.profiles import PROFILES
from benchmarks.proven import Judge
from benchmarks.rounds import Runner
from benchmarks.spec import Cell, Table
from benchmarks.suites import SUITES, Plan, select
from registry import DTYPES, Ledger, device_class, load, load_recipe
from registry.records import document
from registry.settings import ROOT, settings


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every chosen suite has its records, failed cells included as rows; 2 on bad usage with one line."""
    given = parser().parse_args(argv)
    try:
        return _run(given)
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """All options."""
    root = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure proven variants and recipes, one process a cell."
    )
    root.add_argument("--suite", default="*", help=f"glob over {', '.join(SUITES)} (default: all)")
    root.add_argument("--operator", default=None, help="only cells of operators that match this glob")
    root.add_argument("--axes", type=_axes, default={}, metavar="B=8,...", help="only cells of these sizes")
    root.add_argument(
        "--recipe", default="production", help="what engine suites compare with reference (default: production)"
    )
    root.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    root.add_argument("--dtype", default="float32", choices=DTYPES)
    size = root.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="small sizes, under 3 minutes")
    size.add_argument("--full", action="store_true", help="everything, without a limit of time")
    root.add_argument(
        "--memory-limit", type=str, default=None, help="resident bytes of a cell, e.g. 2GiB (default: free less 2 GiB)"
    )
    root.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="torch threads of a cell (default: all cores)"
    )
    root.add_argument("--rounds", type=int, default=None, help="rounds of processes instead of the profile's")
    root.add_argument("--budget", type=float, default=None, help="seconds of timing a cell instead of the profile's")
    root.add_argument("--json", type=Path, default=None, help="write all records to this one file as well")
    root.add_argument(
        "--out", type=Path, default=ROOT / "reports" / "records", help="folder of records (default: reports/records)"
    )
    root.add_argument("--ledger", type=Path, default=None, help="folder of proofs (default: the checkout's)")
    root.add_argument(
        "--plugin", type=Path, action="append", default=[], help="Python file with more variants or operators"
    )
    root.add_argument("--unproven", action="store_true", help="measure unproven variants too; their rows say so")
    root.add_argument(
        "--continue",
        dest="resume",
        action="store_true",
        help="keep the tables that an interrupted run of the same commit, machine and options finished",
    )
    root.add_argument("--list", action="store_true", help="print the tables and cells, measure nothing")
    return root


def _axes(text: str) -> dict[str, int]:
    """Sizes by letter from ``B=8,C=128``."""
    try:
        return {letter: int(size) for letter, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not sizes such as B=8 or B=8,C=128") from None


def _run(given: argparse.Namespace) -> int:
    where = device_class(given.device)
    load_recipe(given.recipe)
    limit_bytes = memory.parse_bytes(given.memory_limit) if given.memory_limit else memory.default_limit_bytes()
    if min(given.threads, given.rounds or 1) < 1 or (given.budget or 1) <= 0 or given.rounds == 0:
        raise ValueError("--threads and --rounds must be at least 1, --budget above 0")
    profile = PROFILES["quick" if given.quick else "full" if given.full else "standard"]
    profile = replace(profile, budget_s=given.budget) if given.budget else profile
    plugins = tuple(str(path) for path in given.plugin)
    catalogue = load(plugins=plugins)
    suites = select(given.suite, catalogue)
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(
            catalogue=catalogue,
            profile=profile,
            recipe=given.recipe,
            device=given.device,
            dtype=given.dtype,
            threads=given.threads,
            plugins=plugins,
            ledger=str(given.ledger) if given.ledger else None,
            shard=str(Path(folder) / "shard.npy"),
        )
        judge = Judge(catalogue, Ledger(given.ledger or settings().ledger), unproven_too=given.unproven)
        found = {name: _tables(suite(plan), given, judge) for name, suite in suites.items()}
        tables = {name: each for name, each in found.items() if each}
        if not tables:
            raise ValueError(f"the {profile.name} profile has no such cells: see {', '.join(suites)} with --list")
        if given.list:
            return _list(tables)
        if "data_fetch" in tables:
            fetch.make_shard(Path(plan.shard), profile.fetch_tokens)
        _measure(given, profile.name, tables, judge, limit_bytes, where)
    return 0


def _tables(tables: list[Table], given: argparse.Namespace, judge: Judge) -> list[Table]:
    """Tables with the proofs looked up; ``--operator``, ``--axes`` and ``--rounds`` applied."""
    chosen = []
    for table in tables:
        cells = tuple(
            c
            for c in table.cells
            if (given.operator is None or fnmatch.fnmatchcase(c.operator, given.operator))
            and given.axes.items() <= dict(c.axes).items()
        )
        marked = tuple(replace(cell, proven=not judge.unproven(cell)) for cell in cells)
        if marked:
            chosen.append(replace(table, cells=marked, rounds=given.rounds or table.rounds))
    return chosen


def _list(tables: dict[str, list[Table]]) -> int:
    for each in (table for found in tables.values() for table in found):
        for cell in each.cells:
            print(f"{cell.label}, {each.rounds} rounds{'' if cell.proven else ', unproven'}")
    return 0


def _measure(
    given: argparse.Namespace, profile: str, tables: dict[str, list[Table]], judge: Judge, limit_bytes: int, where: str
) -> None:
    given.out.mkdir(parents=True, exist_ok=True)
    machine = _machine(given, where)
    total = sum(len(table.cells) * table.rounds for each in tables.values() for table in each)
    every: list[dict[str, Any]] = []
    with tqdm(total=total, unit="cell", dynamic_ncols=True, file=sys.stderr) as bar:

        def progress(cell: Cell) -> None:
            bar.set_postfix_str(cell.label, refresh=False)
            bar.update()

        cells = Runner(judge.catalogue, limit_bytes, judge.refusal, progress, machine["environment"]["rates"])
        for suite, each in tables.items():
            dtype = "" if given.dtype == "float32" else f"-{given.dtype}"
            name = f"{suite}.{where.replace(':', '-')}{dtype}.{profile}.json"
            kept = Kept(given.out / f".{name}.part", machine["environment"], given.memory_limit, use=given.resume)
            records = [record for table in each for record in _rows(table, cells, kept)]
            now = datetime.now(UTC).isoformat(timespec="seconds")
            _write(given.out / name, {**document(records), **machine, "profile": profile, "measured_at": now})
            kept.done()
            every += records
    if given.json is not None:
        _write(given.json, {**document(every), **machine, "profile": profile})
    print(
        f"{len(every)} rows, {sum(r['status'] == 'measured' for r in every)} measured, records in {_shown(given.out)}"
    )


def _rows(table: Table, cells: Runner, kept: Kept) -> list[dict[str, Any]]:
    """A table's records, measured now unless an interrupted run has them."""
    known = kept.get(table)
    if known is not None:
        for _ in range(table.rounds):
            for cell in table.cells:
                cells.progress(cell)
        return known
    found = cells.run(table)
    kept.put(table, found)
    return found


def _machine(given: argparse.Namespace, where: str) -> dict[str, Any]:
    """The environment of all records, with the machine's rates: measured once a machine and kept beside the records."""
    environment = {
        **document([])["environment"],
        "device": torch.cuda.get_device_name(given.device) if where.startswith("cuda") else _processor(),
        "cores": psutil.cpu_count(logical=True),
        "memory_bytes": psutil.virtual_memory().total,
        "threads": given.threads,
    }
    path = given.out / f"machine.{where.replace(':', '-')}.json"
    if path.is_file():
        known = json.loads(path.read_text(encoding="utf-8")).get("environment", {})
        if {k: v for k, v in known.items() if k not in ("rates", "commit")} == environment:
            return {"environment": {**known, "commit": _commit()}}
    environment["rates"] = runner.rates(given.device, given.threads)
    environment["commit"] = _commit()
    _write(path, {**document([]), "environment": environment})
    return {"environment": environment}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    return done.stdout.strip() or None


def _write(path: Path, content: dict[str, Any]) -> None:
    """Atomically, so that a record file is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    sys.exit(main())
