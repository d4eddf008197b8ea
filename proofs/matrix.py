"""The kill matrix: every adversary against the prover, who killed it and how fast.

A survivor fails, and so does a killed right one.
"""

from __future__ import annotations

import fnmatch
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from proofs.judge import Judge
from proofs.prover import Plan, claims_of, judged
from proofs.session import Claims, Session
from proofs.worker import Worker
from registry import Catalogue, load
from registry.records import document

FOLDER = Path(__file__).parent / "adversaries"
LIMIT_S, EXAMPLES, SEEDS = 4.0, 6, 2
# What kills fast comes first; with ``every`` all run anyway.
ORDER = ("forward", "distribution", "purity", "gradient", "identity", "determinism", "layout", "causality")
MECHANISM = re.compile(r"(RIGHT )?(\d+)\. (.+)")
Record = dict[str, Any]


def files() -> list[Path]:
    """The adversary files, one an operator."""
    return sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")


def described(claims: Claims) -> tuple[bool, int, str]:
    """Whether it is a right one, its mechanism's number and what it does; ``ValueError`` when it does not say."""
    found = MECHANISM.match(claims.summary)
    if not found:
        raise ValueError(
            f"adversary {claims.key}: its docstring must begin with 'N. what it does' or 'RIGHT N. ...', "
            f"not {claims.summary!r}"
        )
    return found[1] is not None, int(found[2]), found[3]


def attack(path: Path, name: str, every: bool = False) -> Record:
    """Run the properties on an adversary: a wrong one until a kill (or ``every`` one), a right one to the end."""
    torch.set_num_threads(1)
    plan = Plan(plugins=(path,), limit_s=LIMIT_S, examples=EXAMPLES, real=False)
    claims = next(c for c in _claims(path) if c.name == name)
    right, mechanism, text = described(claims)
    catalogue = _catalogue()
    kills: list[Record] = []
    with Worker(plan.plugins, plan.limit_s) as worker:
        for dtype in (d for d in ("float32", "float64", "bfloat16_autocast") if d in claims.dtypes):
            judge = _judge(catalogue, claims.operator, dtype)
            declared = claims.properties(catalogue.operator(claims.operator).properties, dtype)
            for property_name in sorted(declared, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
                started = time.perf_counter()
                session = Session(
                    judge, worker, claims, claims.option_sets()[0], examples=EXAMPLES, real=False, seeds=SEEDS
                )
                status, message, *_ = judged(property_name, session)
                if status != "passed":
                    duration_ms = round(1000 * (time.perf_counter() - started), 1)
                    kills.append(
                        {
                            "property": property_name,
                            "dtype": dtype,
                            "status": status,
                            "message": message,
                            "duration_ms": duration_ms,
                        }
                    )
                    if not every:
                        break
            if kills and not every:
                break
    return _record(claims, right, mechanism, text, kills)


_KEPT: dict[Any, Any] = {}


def _claims(path: Path) -> list[Claims]:
    """What a file declares, read once a process."""
    if path not in _KEPT:
        _KEPT[path] = claims_of(Plan(plugins=(path,)), only_plugins=True)
    claims: list[Claims] = _KEPT[path]
    return claims


def _catalogue() -> Catalogue:
    """Loaded once a process."""
    if "catalogue" not in _KEPT:
        _KEPT["catalogue"] = load()
    catalogue: Catalogue = _KEPT["catalogue"]
    return catalogue


def _judge(catalogue: Catalogue, operator: str, dtype: str) -> Judge:
    """One judge an operator and dtype, so that truths are computed once a process."""
    key = (operator, dtype)
    if key not in _KEPT:
        _KEPT[key] = Judge(catalogue, operator, dtype)
    judge: Judge = _KEPT[key]
    return judge


def _record(claims: Claims, right: bool, mechanism: int, text: str, kills: list[Record]) -> Record:
    first = kills[0] if kills else {}
    return {
        "adversary": claims.name,
        "operator": claims.operator,
        "mechanism": mechanism,
        "what": text,
        "right": right,
        "expected": "passed" if right else "killed",
        "verdict": "killed" if kills else "passed",
        "killed_by": first.get("property"),
        "dtype": first.get("dtype"),
        "status": first.get("status", "passed"),
        "message": first.get("message", ""),
        "duration_ms": first.get("duration_ms"),
        "kills": [{name: k[name] for name in ("property", "dtype", "status", "duration_ms")} for k in kills],
    }


def chosen(operator: str, variant: str) -> list[tuple[Path, str]]:
    """Every adversary whose operator and name match the globs."""
    found = []
    for path in files():
        for claims in _claims(path):
            described(claims)
            if fnmatch.fnmatchcase(claims.operator, operator) and fnmatch.fnmatchcase(claims.name, variant):
                found.append((path, claims.name))
    return found


def wrong_verdicts(records: Sequence[Record]) -> list[Record]:
    """Survivors and killed right ones."""
    return [record for record in records if record["verdict"] != record["expected"]]


def run(jobs: int, operator: str, variant: str, folder: Path, every: bool = False) -> int:
    """Attack with all adversaries (``every``: with every property); 0 when every verdict is right.

    The full matrix is written to ``kill_matrix.json`` in the ledger's folder.
    """
    work = chosen(operator, variant)
    if not work:
        raise ValueError(f"no adversary matches {operator}/{variant}")
    records: list[Record] = []
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(max_workers=jobs, mp_context=context) as pool,
        tqdm(total=len(work), unit="adversary", disable=not sys.stderr.isatty()) as bar,
    ):
        for future in as_completed([pool.submit(attack, path, name, every) for path, name in work]):
            record = future.result()
            records.append(record)
            bar.update()
            if record["verdict"] != record["expected"]:
                tqdm.write(
                    f"unexpected: {record['operator']}/{record['adversary']} {record['verdict']} {record['message']}",
                    file=sys.stdout,
                )
    records.sort(key=lambda r: (r["operator"], r["right"], r["mechanism"], r["adversary"]))
    if (operator, variant) == ("*", "*"):
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(document(records), indent=1) + "\n"
        (folder / "kill_matrix.json").write_text(text, encoding="utf-8")
    return _tell(records)


def _tell(records: list[Record]) -> int:
    for r in records:
        by = f"{r['killed_by']} ({r['status']}, {r['dtype']}, {r['duration_ms']:.0f} ms)" if r["killed_by"] else "-"
        kind = "right" if r["right"] else "wrong"
        print(f"{r['operator']}/{r['adversary']:28} {r['mechanism']:3d} {kind} {r['verdict']:7} {by}")
    for record in wrong_verdicts(records):
        verdict = "a right variant is killed" if record["right"] else "a wrong variant survives"
        print(f"{verdict}: {record['operator']}/{record['adversary']}: {record['what']} {record['message']}")
    wrong = [r for r in records if not r["right"]]
    killed = sum(r["verdict"] == "killed" for r in wrong)
    spared = sum(r["verdict"] == "passed" for r in records if r["right"])
    print(f"{killed} of {len(wrong)} wrong variants killed, {spared} of {len(records) - len(wrong)} right ones passed")
    return 1 if wrong_verdicts(records) else 0
