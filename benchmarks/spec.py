"""What one cell measures, and the record that a table row becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

STATUSES = ("measured", "killed_memory", "timed_out", "crashed", "refused")
MODES = ("forward", "forward_backward", "step")
KINDS = ("operator", "fetch", "engine", "part", "trainer", "rates")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One process: an operator's variant, or an engine or trainer of a recipe, at one shape, mode and device.

    ``axes`` holds the sizes by letter; ``extras`` what only this kind of workload needs. ``need_bytes`` is what the
    cell is known to hold in advance; more than the limit refuses it without starting. The cell is timed in ``turns``,
    each of one call when ``pinned``, else of as many as its share of ``budget_s`` holds.
    """

    suite: str
    kind: str
    operator: str
    variant: str
    case: str
    axes: Mapping[str, int]
    mode: str
    device: str = "cpu"
    dtype: str = "float32"
    recipe: str | None = None
    options: Mapping[str, int] = field(default_factory=dict)
    values: str = "normal"
    null: bool = False
    proven: bool = True
    budget_s: float = 1.0
    limit_s: float = 300.0
    turns: int = 5
    pinned: bool = False
    need_bytes: int = 0
    threads: int = 1
    seed: int = 0
    plugins: tuple[str, ...] = ()
    ledger: str | None = None
    check_only: bool = False
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in MODES or self.kind not in KINDS:
            raise ValueError(
                f"a cell's mode is one of {MODES} and its kind one of {KINDS}, not {self.mode!r}, {self.kind!r}"
            )

    @property
    def label(self) -> str:
        """What a progress line shows."""
        sizes = ",".join(f"{k}={v}" for k, v in self.axes.items() if k in ("B", "P"))
        null = " (null)" if self.null else ""
        return f"{self.suite}: {self.operator}/{self.variant}{null} {self.case} {sizes} {self.mode}"

    def to_json(self) -> dict[str, Any]:
        """A plain object that ``from_json`` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Cell:
        """The cell that ``to_json`` wrote."""
        return cls(**{**entry, "plugins": tuple(entry["plugins"])})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one process; only a measured one has times, only another status a reason.

    ``alone`` says that its turns were not among those of the table's other rows.
    """

    status: str
    reason: str = ""
    values_s: tuple[float, ...] = ()
    median_s: float | None = None
    peak_bytes: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"a status is one of {', '.join(STATUSES)}, not {self.status!r}")
        if (self.status == "measured") != bool(self.values_s and self.median_s):
            raise ValueError(f"measured has times and {self.status} has {len(self.values_s)} of them")
        if self.status != "measured" and not self.reason:
            raise ValueError(f"{self.status} needs a reason")


@dataclass(frozen=True)
class Table:
    """Cells that are measured in the same rounds; where ``compared``, the first is the reference of the others.

    In a round every cell has a process of its own; where ``together``, all of them are alive and take turns.
    """

    cells: tuple[Cell, ...]
    rounds: int
    checked: bool = True
    compared: bool = True
    together: bool = True

    @property
    def reference(self) -> Cell:
        """The row that the others are divided by."""
        return self.cells[0]
