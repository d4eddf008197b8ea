"""Fetching windows of a shard in one or several processes at once: seconds a fetch, and bytes they all hold."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.memory import proportional_bytes
from benchmarks.spec import Cell
from registry import Bound, Catalogue

ISLANDS, ISLAND_TOKENS = 64, 1 << 16
FETCHES = 64


def make_shard(path: Path, tokens: int, vocabulary: int = 50257) -> None:
    """An int32 shard of that length, sparse on disk: islands of random ids in a sea of zeros."""
    shard = np.lib.format.open_memmap(path, mode="w+", dtype=np.int32, shape=(tokens,))
    random = np.random.default_rng(0)
    for start in island_starts(tokens):
        stop = min(tokens, start + ISLAND_TOKENS)
        shard[start:stop] = random.integers(0, vocabulary, stop - start, dtype=np.int32)
    shard.flush()


def island_starts(tokens: int) -> list[int]:
    """Where the islands begin, spread evenly."""
    count = max(1, min(ISLANDS, tokens // (2 * ISLAND_TOKENS)))
    return [index * (tokens // count) for index in range(count)]


def serve(bound: Bound, path: str, batch: int, seq: int, connection: Connection) -> None:
    """One worker: prepare the shard, then fetch the windows that it is sent until there are none."""
    connection.send("started")
    connection.recv()
    base_bytes = proportional_bytes()  # once all processes are there: what they share is a smaller part for each
    connection.send("noted")
    connection.recv()
    shard = bound.prepare(np.load(path, mmap_mode="r"))
    connection.send("ready")
    while True:
        starts = connection.recv()
        if starts is None:
            return
        for start in starts:
            bound(shard, start, batch, seq)
        connection.send(proportional_bytes() - base_bytes if len(starts) == 1 else 0)


class FetchWork:
    """P processes, each with its own prepared shard; a call is ``FETCHES`` windows in every one of them, at once."""

    def __init__(self, catalogue: Catalogue, cell: Cell) -> None:
        self.cell = cell
        self.bound = catalogue.bind(f"{cell.operator}/{cell.variant}", **cell.options)
        self.path = cell.extras["shard"]
        context = multiprocessing.get_context("fork")
        self.workers: list[tuple[Any, Connection]] = []
        for _ in range(0 if cell.check_only else cell.axes["P"]):
            ours, theirs = context.Pipe()
            arguments = (self.bound, self.path, cell.axes["B"], cell.axes["T"], theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            self.workers.append((process, ours))
        for stage in ("started", "noted", "ready"):
            for process, connection in self.workers:
                if not connection.poll(cell.limit_s) or connection.recv() != stage:
                    raise RuntimeError(f"a fetching process ended with {process.exitcode} before its shard was ready")
            for _, connection in self.workers:
                if stage != "ready":
                    connection.send("go on")

    def item(self, index: int) -> list[list[int]]:
        """Starts of windows in the islands, for every process its own."""
        random = np.random.default_rng([self.cell.seed, index])
        tokens, window = self.cell.axes["L"], self.cell.axes["B"] * self.cell.axes["T"]
        islands = np.array(island_starts(tokens))
        room = min(ISLAND_TOKENS, tokens) - window - 1
        shape = (self.cell.axes["P"], FETCHES)
        starts = islands[random.integers(len(islands), size=shape)] + random.integers(room, size=shape)
        return [[int(start) for start in row] for row in starts]

    def item_bytes(self) -> int:
        """A batch is one item: a call already holds many fetches."""
        return 1 << 40

    def call(self, item: list[list[int]]) -> None:
        """All processes fetch their windows; done when the last one is."""
        for (_, connection), starts in zip(self.workers, item, strict=True):
            connection.send(starts)
        for _, connection in self.workers:
            connection.recv()

    def check(self, seed: int) -> dict[str, Tensor]:
        """Windows that were never timed, fetched here."""
        shard = self.bound.prepare(np.load(self.path, mmap_mode="r"))
        starts = self.item(seed)[0][:4]
        pairs = [self.bound(shard, start, self.cell.axes["B"], self.cell.axes["T"]) for start in starts]
        return {"inputs": torch.stack([p[0] for p in pairs]), "targets": torch.stack([p[1] for p in pairs])}

    def resident_bytes(self) -> int:
        """What all processes hold more than before they opened the shard, shared pages counted once."""
        total = 0
        for (_, connection), starts in zip(self.workers, self.item(1_000_000), strict=True):
            connection.send(starts[:1])
            total += int(connection.recv())
        return total

    def memory_call(self) -> Callable[[], Any]:
        """Unused: residence is asked of the processes."""
        return lambda: None

    def close(self) -> None:
        """End the processes."""
        for process, connection in self.workers:
            connection.send(None)
            process.join(timeout=5)
