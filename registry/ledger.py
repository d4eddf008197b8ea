"""The ledger of proofs: one JSON line per key, one file an operator, and what is missing or stale in it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from registry.recipe import Recipe
from registry.records import Key, Proof, options_key
from registry.settings import settings
from registry.source import digest
from registry.static import StaticCatalogue, StaticVariant, enumerate_static

RECIPE, ENGINE = "recipe", "engine"


@dataclass(frozen=True)
class Gap:
    """Why one property of a variant does not count as proven."""

    property: str
    dtype: str
    options: Mapping[str, Any]
    state: str
    reason: str

    def __str__(self) -> str:
        changed = ",".join(f"{k}={v}" for k, v in self.options.items())
        at = f" at {changed}" if changed else ""
        return f"{self.property} ({self.dtype}{at}) is {self.state}: {self.reason}"


class Ledger:
    """Proof records of a folder, ``<operator>.jsonl`` each; read when asked, written whole and atomically."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(folder) if folder is not None else settings().ledger
        self._read: dict[str, dict[Key, Proof]] = {}

    def records(self, operator: str) -> dict[Key, Proof]:
        """All of an operator's records by key; ``ValueError`` naming file and line for one that cannot be read."""
        if operator not in self._read:
            self._read[operator] = self._load(operator)
        return self._read[operator]

    def _load(self, operator: str) -> dict[Key, Proof]:
        path = self.folder / f"{operator}.jsonl"
        found: dict[Key, Proof] = {}
        if path.is_file():
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                try:
                    proof = Proof.from_json(json.loads(line))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}; delete the line and prove again") from error
                found[proof.key] = proof
        return found

    def write(self, proofs: Iterable[Proof]) -> None:
        """Put proofs in place of older ones of the same key; other lines stay. Only ``proofs`` calls this."""
        by_operator: dict[str, list[Proof]] = {}
        for proof in proofs:
            by_operator.setdefault(proof.operator, []).append(proof)
        self.folder.mkdir(parents=True, exist_ok=True)
        for operator, new in by_operator.items():
            with FileLock(Path(tempfile.gettempdir()) / f"fractus-ledger-{digest(str(self.folder.resolve()))}.lock"):
                merged = {**self._load(operator), **{proof.key: proof for proof in new}}
                lines = [json.dumps(merged[key].to_json(), sort_keys=True) + "\n" for key in sorted(merged)]
                temporary = self.folder / f".{operator}.{os.getpid()}.tmp"
                temporary.write_text("".join(lines), encoding="utf-8")
                os.replace(temporary, self.folder / f"{operator}.jsonl")
                self._read[operator] = merged

    def latest(self, key: Key) -> Proof | None:
        """The record of a key, if there is one."""
        return self.records(key[0]).get(key)

    def gap(
        self,
        catalogue: StaticCatalogue,
        variant: StaticVariant,
        property_name: str,
        dtype: str,
        device_class: str,
        options: Mapping[str, Any],
    ) -> Gap | None:
        """None when the property is proven as the code stands now, else what is missing or changed."""
        key = (variant.operator, variant.name, options_key(options), property_name, dtype, device_class)
        proof = self.latest(key)
        if proof is None:
            return Gap(property_name, dtype, options, "missing", f"never proven on {device_class}")
        changed = differences(proof.fingerprint, catalogue.fingerprint(variant, property_name))
        if changed:
            return Gap(property_name, dtype, options, "stale", "; ".join(changed))
        if proof.status != "passed":
            return Gap(property_name, dtype, options, proof.status, proof.message)
        return None

    def recipe_gap(
        self, recipe: Recipe, dtype: str, device_class: str, catalogue: StaticCatalogue | None = None
    ) -> Gap | None:
        """None when the recipe's own proof (the whole engine against the reference recipe) is current, else why not."""
        catalogue = enumerate_static() if catalogue is None else catalogue
        proof = self.latest((RECIPE, recipe.name, options_key({}), ENGINE, dtype, device_class))
        if proof is None:
            return Gap(ENGINE, dtype, {}, "missing", f"never proven on {device_class}")
        changed = differences(proof.fingerprint, catalogue.recipe_fingerprint(recipe.variants, recipe.options))
        if changed:
            return Gap(ENGINE, dtype, {}, "stale", "; ".join(changed))
        return None if proof.status == "passed" else Gap(ENGINE, dtype, {}, proof.status, proof.message)

    def gaps(
        self, variant: StaticVariant, device_class: str, dtype: str, catalogue: StaticCatalogue | None = None
    ) -> list[Gap]:
        """Everything that keeps a variant from being proven on a device and dtype; empty when it is.

        Under ``bfloat16_autocast`` the float32 proofs are needed as well: autocast has one property of its own.
        """
        catalogue = enumerate_static() if catalogue is None else catalogue
        dtypes = ("float32", "bfloat16_autocast") if dtype == "bfloat16_autocast" else (dtype,)
        if device_class.split(":")[0] not in variant.devices:
            return [
                Gap("domain", dtype, {}, "not claimed", f"{variant.key} claims devices {', '.join(variant.devices)}")
            ]
        if dtype not in variant.dtypes:
            return [Gap("domain", dtype, {}, "not claimed", f"{variant.key} claims dtypes {', '.join(variant.dtypes)}")]
        found = []
        for each in dtypes:
            for options in variant.option_sets():
                for name in catalogue.required(variant, each):
                    gap = self.gap(catalogue, variant, name, each, device_class, options)
                    if gap is not None:
                        found.append(gap)
        return found

    def is_proven(
        self, variant: StaticVariant | str, device_class: str, dtype: str, catalogue: StaticCatalogue | None = None
    ) -> bool:
        """True when every property that applies has a current passed proof, at every option set."""
        catalogue = enumerate_static() if catalogue is None else catalogue
        static = catalogue.variants[variant] if isinstance(variant, str) else variant
        return not self.gaps(static, device_class, dtype, catalogue)


def differences(proven: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What changed between two fingerprints, in words that name the definitions."""
    changed = []
    before, after = proven.get("variant", {}), current["variant"]
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            verb = "appeared" if name not in before else "is gone" if name not in after else "changed"
            changed.append(f"{name} {verb}")
    words = {
        "reference": "the operator's reference changed",
        "operator": "the operator's contract or cases changed",
        "tolerance": "the operator's tolerance changed",
        "property": "the property that judged it changed",
    }
    changed += [text for role, text in words.items() if proven.get(role) != current[role]]
    if proven.get("torch") != current["torch"]:
        changed.append(f"torch {proven.get('torch')} became {current['torch']}")
    return changed
