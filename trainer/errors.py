"""The two ways a run ends early: what the caller asked cannot be done, and what came up while training."""

from __future__ import annotations


class UsageError(ValueError):
    """What the caller asked cannot be done; the message is one line with the remedy, the exit code 2."""


class TrainingError(RuntimeError):
    """Training had to stop (a non-finite number, a full disk); the message says what was kept, the exit code 1."""
