"""Long chains of the carry: what ``python -m proofs --long`` found, kept beside the ledger. No proof rests on it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from registry.records import SCHEMA_VERSION, Proof, document

LONG = "long.json"
STANDARD_CHUNKS = 64


def is_long(proof: Proof) -> bool:
    """Whether a proof is a carry that passed over more chunks than the standard run has."""
    points = proof.details.get("drift") or [{"chunk": 0}]
    return proof.property == "carry" and proof.status == "passed" and bool(points[-1]["chunk"] > STANDARD_CHUNKS)


def read(folder: Path) -> list[Proof]:
    """The long chains kept in a ledger's folder, if any; ``ValueError`` for a file of another form."""
    path = folder / LONG
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {content['schema_version']}, this is {SCHEMA_VERSION}")
        return [Proof.from_json(entry) for entry in content["records"]]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no long chains: {error}; run python -m proofs --long again") from error


def keep(proofs: Iterable[Proof], folder: Path) -> Path | None:
    """Add the long chains among ``proofs`` to those kept, each in the place of its forerunner; None without any."""
    found = [proof for proof in proofs if is_long(proof)]
    if not found:
        return None
    kept = {proof.key: proof for proof in [*read(folder), *found]}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LONG
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document([kept[key].to_json() for key in sorted(kept)]), indent=1) + "\n")
    os.replace(temporary, path)
    return path
