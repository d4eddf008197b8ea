"""Proofs: the record that one property of one variant was judged, with its numbers."""

from __future__ import annotations

import builtins
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from registry.static import version

SCHEMA_VERSION = 1
STATUSES = (
    "passed",
    "mismatch",
    "wrong_shape",
    "wrong_dtype",
    "non_finite",
    "mutated_input",
    "aliased",
    "leaked_state",
    "not_written",
    "over_memory",
    "fell_back",
    "crashed",
    "timed_out",
    "skipped",
)
Key = tuple[str, str, str, str, str, str]


def options_key(options: Mapping[str, Any]) -> str:
    """Options in one canonical spelling, part of a proof's key."""
    return json.dumps(dict(options), sort_keys=True, separators=(",", ":"))


def environment() -> dict[str, Any]:
    """What numbers depend on and may be published: versions and the processor's architecture."""
    return {
        "torch": version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
    }


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One verdict. Only ``passed`` proves, and a passed without numbers cannot be made."""

    operator: str
    variant: str
    property: str
    dtype: str
    device_class: str
    status: str
    options: Mapping[str, Any] = field(default_factory=dict)
    cases: int = 0
    checks: int = 0
    redrawn: int = 0
    worst_error: float | None = None
    budget_used: float | None = None
    where: str = ""
    message: str = ""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=environment)
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    duration_s: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"a proof's status is one of {', '.join(STATUSES)}, not {self.status!r}")
        if self.status == "passed":
            numbers = (self.worst_error, self.budget_used)
            if any(n is None or not math.isfinite(n) for n in numbers) or self.checks < 1 or self.cases < 1:
                raise ValueError(
                    f"{self.label}: passed needs a worst error, a budget used and at least one case checked"
                )
            if self.budget_used is not None and not 0 <= self.budget_used <= 1:
                raise ValueError(f"{self.label}: passed with budget used {self.budget_used}, which is not within 0..1")
        elif not self.message:
            raise ValueError(f"{self.label}: {self.status} needs a message that says why")

    @builtins.property
    def label(self) -> str:
        """``operator/variant property dtype device``."""
        return f"{self.operator}/{self.variant} {self.property} {self.dtype} {self.device_class}"

    @builtins.property
    def key(self) -> Key:
        """What a ledger has one line for."""
        return (self.operator, self.variant, options_key(self.options), self.property, self.dtype, self.device_class)

    def to_json(self) -> dict[str, Any]:
        """A plain object; numbers that are not finite become null, as JSON has none."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Proof:
        """The proof of a ledger line; ``ValueError`` for fields that do not exist."""
        try:
            return cls(**entry)
        except TypeError as error:
            raise ValueError(f"not a proof record: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def document(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The one form of every JSON output: schema version, environment, records."""
    return {"schema_version": SCHEMA_VERSION, "environment": environment(), "records": records}
