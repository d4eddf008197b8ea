"""``metrics.jsonl``: a line a step, and never two for one step, whatever happened in between."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FIELDS = ("step", "token", "tf", "ema_tf", "ss", "ema_ss", "lb", "grad_norm", "tokens_per_s", "peak_bytes")


class MetricsFile:
    """Appends to the file after cutting off every line past ``step``, which a kill left there after the last save."""

    def __init__(self, path: Path, step: int) -> None:
        truncate(path, step)
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step's record; its fields are exactly ``FIELDS``."""
        assert tuple(record) == FIELDS
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Put the lines on disk, so that a checkpoint never leads them."""
        os.fsync(self._file.fileno())


def truncate(path: Path, step: int) -> None:
    """Cut the file before its first line that is incomplete or of a later step."""
    if not path.exists():
        return
    keep = 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n") or not _is_line_up_to(line, step):
                break
            keep += len(line)
    os.truncate(path, keep)


def _is_line_up_to(line: bytes, step: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= step


def read(path: Path) -> list[dict[str, Any]]:
    """Every record of the file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
