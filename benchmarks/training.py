"""The whole trainer as a command: seconds a step from its own metrics, the scheduled-sampling branch included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.fetch import make_shard
from benchmarks.spec import Cell

WARM_STEPS = 2


def train(cell: Cell) -> dict[str, Any]:
    """Run the trainer on random tokens; ``values_s`` of all steps but the first two, and the metrics' peak bytes.

    ``RuntimeError`` with the trainer's last line when it ends badly.
    """
    B, C, steps = cell.axes["B"], cell.axes["C"], int(cell.extras["steps"])
    with TemporaryDirectory() as folder:
        shard, out, sizes = Path(folder) / "shard.npy", Path(folder) / "out", Path(folder) / "sizes.toml"
        make_shard(shard, (steps + 2) * B * C + C + 2, cell.extras["sizes"]["vocab_size"])
        sizes.write_text("".join(f"{k} = {v}\n" for k, v in cell.extras["sizes"].items()), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "trainer",
            "run",
            "--shard",
            str(shard),
            "--out",
            str(out),
            "--size",
            str(sizes),
        ]
        command += [
            "--recipe",
            str(cell.recipe),
            "--device",
            cell.device,
            "--steps",
            str(steps),
            "--seed",
            str(cell.seed),
        ]
        command += ["--batch", str(B), "--seq", str(C), "--dtype", cell.dtype]
        command += ["--ledger", cell.ledger] if cell.ledger else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"the trainer ended with {done.returncode}: {last}")
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timed = [line for line in lines[WARM_STEPS:] if line["tokens_per_s"]]
    return {
        "values_s": [B * C / line["tokens_per_s"] for line in timed],
        "peak_bytes": max((line["peak_bytes"] or 0 for line in lines), default=0) or None,
        "details": {"sampling_steps": sum(line["ss"] is not None for line in timed), "peak_is": "whole process"},
    }
