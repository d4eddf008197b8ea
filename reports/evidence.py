"""The ledger as tables: what is proven with how much of its budget, and which adversary each property kills."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from registry import Ledger, Proof, long
from registry.ledger import RECIPE
from registry.records import options_key
from registry.static import StaticCatalogue, StaticVariant
from reports import drift
from reports.records import read_json
from reports.text import DASH, page, table

KILL_MATRIX = "kill_matrix.json"


def ledger_sha256(ledger: Ledger) -> str:
    """Of the ledger's files, the long chains included."""
    digest = hashlib.sha256()
    for path in sorted([*ledger.folder.glob("*.jsonl"), *ledger.folder.glob(long.LONG)]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def proofs_page(ledger: Ledger, catalogue: StaticCatalogue) -> str:
    """Every variant's state as recorded, and its worst use of the error budget by property."""
    parts = []
    for operator in catalogue.operators.values():
        variants = [v for v in catalogue.variants.values() if v.operator == operator.name]
        variants.sort(key=lambda v: (v.name != operator.reference, v.name))
        proofs = [p for p in ledger.records(operator.name).values() if p.status == "passed"]
        properties = [p for p in operator.properties if any(proof.property == p for proof in proofs)]
        places = sorted({(p.device_class, p.dtype) for p in proofs}) or [("cpu", "float32")]
        rows = [_row(variant, place, proofs, properties, catalogue) for variant in variants for place in places]
        columns = ["Variant", "Where", "Required", *properties, "Worst error", "Redrawn", "Checks"]
        parts += [f"## {operator.name}", table(columns, rows)]
    parts += ["## Recipes", _recipes(ledger), drift.section(long.read(ledger.folder), catalogue)]
    intro = (
        "A number under a property is the largest part of its error budget that any check used; 1 is the limit. "
        "Required counts the proofs recorded as passed of those that a variant needs at all its option sets; whether "
        "they still hold for the sources as they are is what `python -m registry why` and the gate say."
    )
    return page("Proofs", intro, *parts, foot=f"Ledger SHA-256 `{ledger_sha256(ledger)}`")


def _row(
    variant: StaticVariant,
    place: tuple[str, str],
    proofs: Iterable[Proof],
    properties: Iterable[str],
    catalogue: StaticCatalogue,
) -> list[str]:
    device, dtype = place
    own = [p for p in proofs if p.variant == variant.name and (p.device_class, p.dtype) == place]
    needed = {(name, options_key(o)) for o in variant.option_sets() for name in catalogue.required(variant, dtype)}
    passed = {(p.property, options_key(p.options)) for p in own}
    used = [_worst(p for p in own if p.property == name) for name in properties]
    counts = [str(sum(p.redrawn for p in own)), str(sum(p.checks for p in own))]
    return [variant.name, f"{device} {dtype}", f"{len(needed & passed)} of {len(needed)}", *used, _error(own), *counts]


def _worst(proofs: Iterable[Proof]) -> str:
    used = [p.budget_used for p in proofs if p.budget_used is not None]
    return f"{max(used):.3g}" if used else DASH


def _error(proofs: Iterable[Proof]) -> str:
    errors = [p.worst_error for p in proofs if p.worst_error is not None]
    return f"{max(errors):.3g}" if errors else DASH


def _recipes(ledger: Ledger) -> str:
    proofs = ledger.records(RECIPE).values()
    rows = [[p.variant, f"{p.device_class} {p.dtype}", p.status, _worst([p]), _error([p]), p.where] for p in proofs]
    return table(["Recipe", "Where", "Status", "Budget used", "Worst error", "At"], sorted(rows))


def kill_records(folder: Path) -> list[dict[str, Any]] | None:
    """The adversaries' verdicts, None where they were never run."""
    path = folder / KILL_MATRIX
    if not path.is_file():
        return None
    records = list(read_json(path)[0]["records"])
    if any(not isinstance(r.get("kills"), list) for r in records):
        raise ValueError(f"{path} is of an older form: attack again with: python -m proofs --adversaries")
    return records


def _kills(record: dict[str, Any]) -> dict[str, float]:
    """Milliseconds by property, the fewest over dtypes."""
    found: dict[str, float] = {}
    for kill in record["kills"]:
        known = found.get(kill["property"], kill["duration_ms"])
        found[kill["property"]] = min(known, kill["duration_ms"])
    return found


def survivors(records: Iterable[dict[str, Any]]) -> list[str]:
    """Wrong variants that passed, and right ones that were rejected."""
    found = []
    for r in records:
        if not r["right"] and r["verdict"] != "killed":
            found.append(f"{r['adversary']} ({r['operator']}: {r['what']}) is wrong and passed")
        if r["right"] and r["verdict"] == "killed":
            found.append(
                f"{r['adversary']} ({r['operator']}: {r['what']}) is right and was rejected by {r['killed_by']}"
            )
    return found


def kill_page(folder: Path) -> str:
    """Adversary by property: the milliseconds after which the property rejected it, in whatever dtype was fastest."""
    records = kill_records(folder)
    if records is None:
        return ""
    kills = {(r["operator"], r["adversary"]): _kills(r) for r in records}
    properties = sorted({name for found in kills.values() for name in found})
    rows = []
    for r in sorted(records, key=lambda r: (r["right"], r["operator"], r["adversary"])):
        found = kills[r["operator"], r["adversary"]]
        right = r["verdict"] == ("passed" if r["right"] else "killed")
        rows.append(
            [
                r["adversary"],
                r["operator"],
                str(r["mechanism"]),
                "right" if r["right"] else "wrong",
                *(f"{found[name]:.0f}" if name in found else "" for name in properties),
                r["verdict"] if right else f"**{r['verdict']}**",
                r["what"],
            ]
        )
    wrong = sum(not r["right"] for r in records)
    alive = survivors(records)
    head = (
        f"{wrong} wrong variants and {len(records) - wrong} right ones; {len(alive)} judged wrongly. A number is the "
        "milliseconds until the property rejected it, in the dtype where that was fastest; mechanisms are numbered, "
        "and several adversaries may share one."
    )
    body = table(["Adversary", "Operator", "Mechanism", "Is", *properties, "Verdict", "What it does"], rows)
    digest = hashlib.sha256((folder / KILL_MATRIX).read_bytes()).hexdigest()
    return page("Kill matrix", head, body, foot=f"Records SHA-256 `{digest}`")
