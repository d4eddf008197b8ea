"""The parent's handle on one isolated child: start, ask with a time limit, kill, and the status of what went wrong."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from proofs import wire
from proofs.child import serve

START_LIMIT_S = 120.0


class Rejection(Exception):
    """A property does not hold: the status, the words and the numbers of the first place where it fails."""

    def __init__(
        self, status: str, message: str, *, where: str = "", error: float | None = None, used: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.where, self.error, self.used = status, message, where, error, used


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["proofs.preload"])
    return context


class Worker:
    """One child process that serves one variant; a new one is started after a death."""

    def __init__(self, plugins: Sequence[Path] = (), limit_s: float = 60.0, threads: int = 1) -> None:
        self.plugins = [str(path) for path in plugins]
        self.limit_s = limit_s
        self.threads = threads
        self._process: Any = None
        self._connection: Connection | None = None
        self._log = ""
        self.listing: list[dict[str, Any]] = []

    def start(self) -> None:
        """Start the child and read what it declares; ``Rejection`` when it dies or hangs while loading."""
        descriptor, self._log = tempfile.mkstemp(prefix="proofs-child-", suffix=".log")
        os.close(descriptor)
        here, there = multiprocessing.Pipe()
        context = _context()
        self._process = context.Process(target=serve, args=(there, self._log, self.plugins, self.threads), daemon=True)
        self._process.start()
        there.close()
        self._connection = here
        answer = self._receive(START_LIMIT_S, "loading the variant")
        if not isinstance(answer, dict) or not isinstance(answer.get("ready"), list):
            raise self._dead("crashed", "sent something else than what it declares")
        self.listing = answer["ready"]

    def ask(self, request: dict[str, Any], limit_s: float | None = None) -> dict[str, Any]:
        """Send a request and wait; ``Rejection`` crashed or timed_out when no well-formed answer comes."""
        if self._connection is None:
            self.start()
        assert self._connection is not None
        what = f"{request['op']} of {request.get('variant', '')}"
        try:
            wire.send(self._connection, request)
        except (BrokenPipeError, ConnectionResetError):
            raise self._dead("crashed", f"died before {what}") from None
        answer = self._receive(self.limit_s if limit_s is None else limit_s, what)
        if not isinstance(answer, dict):
            raise self._dead("crashed", f"answered {what} with something that is no answer")
        return answer

    def _receive(self, limit_s: float, what: str) -> Any:
        assert self._connection is not None
        if not self._connection.poll(limit_s):
            raise self._dead("timed_out", f"gave no answer within {limit_s:g} s ({what})")
        try:
            return wire.receive(self._connection)
        except (EOFError, ConnectionResetError):
            raise self._dead("crashed", f"ended without an answer ({what})") from None
        except (wire.ForgedMessageError, OSError) as error:
            raise self._dead("crashed", f"sent a forged message ({error})") from None

    def _dead(self, status: str, what: str) -> Rejection:
        process = self._process
        if status == "crashed":
            process.join(timeout=5)
        code = process.exitcode
        last = self._last_line()
        self.stop()
        if code is not None and code < 0:
            ending = f", killed by {signal.Signals(-code).name}" if status == "crashed" else ""
        else:
            ending = f", exit code {code}" if code is not None else ""
        return Rejection(status, f"the process {what}{ending}{f': {last}' if last else ''}")

    def _last_line(self) -> str:
        lines = Path(self._log).read_text(encoding="utf-8", errors="replace").strip().splitlines() if self._log else []
        return lines[-1][:300] if lines else ""

    def stop(self) -> None:
        """End the child and everything it started."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.join(timeout=0.2)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            if self._process.is_alive():
                self._process.kill()
            self._process.join()
            self._process = None
        if self._log:
            Path(self._log).unlink(missing_ok=True)
            self._log = ""

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
