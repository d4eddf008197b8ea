"""Tables of a suite that are measured already, kept on disk until the suite is done, for a run that was interrupted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.spec import Table

Records = list[dict[str, Any]]
ELSEWHERE = ("shard",)  # extras that say where something lies, another place each run


@dataclass
class Kept:
    """A line of JSON a finished table, in a hidden file beside the suite's records.

    Only ``use`` takes what is there; a table counts as the same when its cells, rounds, asked-for memory limit
    and environment (commit included) are.
    """

    path: Path
    environment: Mapping[str, Any]
    limit: str | None
    use: bool = False
    known: dict[str, Records] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.use:
            self.path.unlink(missing_ok=True)
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []:
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # the line that was being written when the run ended
            self.known[entry["table"]] = entry["records"]

    def get(self, table: Table) -> Records | None:
        """The table's records if it was finished before."""
        return self.known.get(self._name(table))

    def put(self, table: Table, records: Records) -> None:
        """Keep a finished table's records."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"table": self._name(table), "records": records}) + "\n")

    def done(self) -> None:
        """The suite's own file is written: nothing needs to be kept."""
        self.path.unlink(missing_ok=True)

    def _name(self, table: Table) -> str:
        cells = [
            replace(c, ledger=None, extras={k: v for k, v in c.extras.items() if k not in ELSEWHERE}).to_json()
            for c in table.cells
        ]
        known = {"cells": cells, "rounds": table.rounds, "limit": self.limit, "environment": self.environment}
        return json.dumps(known, sort_keys=True, default=str)
