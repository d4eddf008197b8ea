"""Benchmark records from disk: read, checked, chosen by profile, and hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.records import SCHEMA_VERSION

Record = Mapping[str, Any]
PROFILES = ("quick", "standard", "full")
SUITES = (
    "attention", "cross_entropy", "moe", "sampler", "data_fetch", "block", "optimizer_step",
    "engine", "engine_1b", "trainer", "scaling", "breakdown", "cumulative",
)  # fmt: skip
NEEDED = {
    "suite", "operator", "variant", "recipe", "case", "axes", "mode", "device", "dtype", "status", "values_s",
    "median_s", "peak_bytes", "floor_s",
}  # fmt: skip


@dataclass(frozen=True)
class Document:
    """One record file: a suite on a device class under a profile."""

    path: Path
    environment: Mapping[str, Any]
    profile: str
    records: tuple[Record, ...]
    text: str
    measured_at: str = ""

    @property
    def place(self) -> tuple[str, str]:
        """Suite, and device class with a dtype that is not float32, by the file's name."""
        suite, device, *_ = self.path.name.split(".")
        return suite, device

    @property
    def rank(self) -> tuple[bool, str, int]:
        """Which of a place's documents is shown: the greatest."""
        return self.profile != "quick", self.measured_at, PROFILES.index(self.profile)


@dataclass(frozen=True)
class Records:
    """The documents that reports are made of, one a suite and device: the last measured one that is not quick."""

    documents: tuple[Document, ...]

    def of(self, suite: str, device: str | None = None) -> list[Record]:
        """A suite's records, those of one device class when asked."""
        found = [r for d in self.documents for r in d.records if r["suite"] == suite]
        return [r for r in found if device is None or r["device"] == device]

    def devices(self) -> list[str]:
        """The device classes that were measured, cpu first."""
        return sorted({r["device"] for d in self.documents for r in d.records}, key=lambda name: (name != "cpu", name))

    def environments(self) -> list[Mapping[str, Any]]:
        """Each different environment once, the commit left out."""
        found: dict[str, Mapping[str, Any]] = {}
        for document in self.documents:
            known = {k: v for k, v in document.environment.items() if k != "commit"}
            found.setdefault(json.dumps(known, sort_keys=True), known)
        return list(found.values())

    def sha256(self, suites: Iterable[str] | None = None) -> str:
        """Of the record files' names and contents, all or those of some suites."""
        wanted = None if suites is None else set(suites)
        digest = hashlib.sha256()
        for document in sorted(self.documents, key=lambda d: d.path.name):
            if wanted is None or document.place[0] in wanted:
                digest.update(document.path.name.encode() + b"\0" + document.text.encode() + b"\0")
        return digest.hexdigest()


def read_json(path: Path) -> tuple[dict[str, Any], str]:
    """A JSON output of this project and its text; ``ValueError`` with one line for what is not one, or is older."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("records"), list) or "schema_version" not in content:
        raise ValueError(f"{path} is not a record file: it has no schema_version and records")
    if content["schema_version"] != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {content['schema_version']}, this is {SCHEMA_VERSION}: measure again"
        )
    return content, text


def load(folder: Path) -> Records:
    """Of each suite and device the last measured record file, a quick one only where there is no other.

    So that tables show what was measured here and now, not an older and longer run, perhaps of another machine.
    ``ValueError`` naming a bad file.
    """
    if not folder.is_dir():
        raise ValueError(f"no folder of records {folder}; make it with: python -m benchmarks")
    best: dict[tuple[str, str], Document] = {}
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith("machine."):
            continue
        document = _document(path)
        known = best.get(document.place)
        if known is None or document.rank > known.rank:
            best[document.place] = document
    return Records(tuple(best[place] for place in sorted(best)))


def load_all(folder: Path) -> list[Document]:
    """Every record file of a folder, all profiles."""
    return [_document(path) for path in sorted(folder.glob("*.json")) if not path.name.startswith("machine.")]


def _document(path: Path) -> Document:
    content, text = read_json(path)
    profile = content.get("profile")
    if profile not in PROFILES:
        raise ValueError(f"{path} has profile {profile!r}, not {', '.join(PROFILES)}")
    for number, record in enumerate(content["records"]):
        missing = NEEDED - set(record) if isinstance(record, dict) else NEEDED
        if missing:
            raise ValueError(f"{path}, record {number}: no {', '.join(sorted(missing))}: measure again")
    measured_at = str(content.get("measured_at", ""))
    return Document(path, content.get("environment", {}), profile, tuple(content["records"]), text, measured_at)
