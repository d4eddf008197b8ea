"""The loop: fetch, step, record, save; a signal or a non-finite number ends it with a whole checkpoint on disk."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from trainer import checkpoint
from trainer.checks import batches_left, file_stamp
from trainer.configuration import RunConfiguration
from trainer.errors import TrainingError, UsageError
from trainer.metrics import MetricsFile
from trainer.session import Session, check_room, prepare
from trainer.step import NonFiniteError, StepResult

EMA_DECAY = 0.98
LOCK_NAME = ".lock"


def run(configuration: RunConfiguration) -> int:
    """Train as configured and return 0, or 128 + the signal that ended it; raises ``UsageError``, ``TrainingError``."""
    session = prepare(configuration)
    print(f"{session.origin}; {session.operators.name}: {', '.join(b.label for b in session.operators.values())}")
    steps = steps_left(session)
    if not steps:
        print(
            f"nothing left to do: step {session.progress.step}, token {session.progress.token} of {session.shard.size}"
        )
        return 0
    check_room(session)
    with held(configuration), stop_signals() as stop:
        if file_stamp(configuration.checkpoint) != session.stamp:
            raise UsageError(
                f"{configuration.checkpoint} was written by another worker just now; run the command again"
            )
        train(session, steps, stop)
    progress = session.progress
    print(
        f"step {progress.step}, next token {progress.token}, ema_tf {progress.ema_tf:.4f}; "
        f"saved {configuration.checkpoint}"
    )
    if stop:
        print(f"stopped by {stop[0].name}; the same command goes on from here")
    return 128 + stop[0] if stop else 0


def steps_left(session: Session) -> int:
    """Steps still to do; the last one may have fewer than ACCUM batches."""
    return -(-batches_left(session.configuration, session.shard, session.progress) // session.configuration.accum)


@contextlib.contextmanager
def held(configuration: RunConfiguration) -> Iterator[None]:
    """Make the folders and hold them against a second worker; ``UsageError`` when one has them."""
    checkpoint_path = configuration.checkpoint
    with contextlib.ExitStack() as stack:
        for path in (configuration.folder / LOCK_NAME, checkpoint_path.with_name(f".{checkpoint_path.name}.lock")):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(FileLock(path, timeout=0))
            except Timeout:
                raise UsageError(f"another worker is training in {path.parent}; give this one another --out") from None
        yield


@contextlib.contextmanager
def stop_signals() -> Iterator[list[signal.Signals]]:
    """A list that SIGINT and SIGTERM are put in, to be acted on between steps; a second one acts at once."""
    came: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(signal.Signals(number))
        signal.signal(number, before[came[-1]])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, note)
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(session: Session, steps: int, stop: list[signal.Signals]) -> None:
    """Do the steps, saving every ``save_every`` and at the end, whatever ends it."""
    configuration = session.configuration
    shard = session.operators["data_fetch"].prepare(session.shard)
    first = session.progress.step
    with (
        MetricsFile(configuration.folder / "metrics.jsonl", first) as metrics,
        tqdm(total=first + steps, initial=first, unit="step", dynamic_ncols=True) as bar,
    ):
        while session.progress.step < first + steps and not stop:
            one_step(session, shard, metrics, bar)
            if session.progress.step % configuration.save_every == 0:
                save(session, metrics)
        if session.progress.step % configuration.save_every:
            save(session, metrics)


def save(session: Session, metrics: MetricsFile) -> None:
    """Metrics first, so that a checkpoint never leads its lines."""
    metrics.sync()
    checkpoint.save(session.configuration.checkpoint, session.content())


def one_step(session: Session, shard: Any, metrics: MetricsFile, bar: Any) -> None:
    """One training step, recorded; a non-finite number saves the last good state and raises ``TrainingError``."""
    configuration, progress = session.configuration, session.progress
    count = min(configuration.accum, batches_left(configuration, session.shard, progress))
    fetch = session.operators["data_fetch"]
    started_s = time.perf_counter()
    starts = [progress.token + index * configuration.batch_tokens for index in range(count)]
    batches = [fetch(shard, start, configuration.batch, configuration.seq) for start in starts]
    try:
        result = session.stepper.step(progress.step + 1, batches)
    except NonFiniteError as error:
        raise stopped(session, error, count, metrics) from None
    record(session, result, count, time.perf_counter() - started_s, metrics, bar)


def record(
    session: Session, result: StepResult, batches: int, elapsed_s: float | None, metrics: MetricsFile, bar: Any = None
) -> None:
    """Move the progress past the step, write its line and update the bar."""
    progress, tokens = session.progress, batches * session.configuration.batch_tokens
    progress.step += 1
    progress.token += tokens
    progress.ema_tf = moving_average(progress.ema_tf, result.tf)
    if result.ss is not None:
        progress.ema_ss = moving_average(progress.ema_ss, result.ss)
    line = {
        "step": progress.step,
        "token": progress.token,
        "tf": result.tf,
        "ema_tf": progress.ema_tf,
        "ss": result.ss,
        "ema_ss": progress.ema_ss,
        "lb": result.lb,
        "grad_norm": result.grad_norm,
        "tokens_per_s": tokens / elapsed_s if elapsed_s else None,
        "peak_bytes": peak_bytes(session.device),
    }
    metrics.write(line)
    if bar is not None:
        ema_ss = "-" if progress.ema_ss is None else f"{progress.ema_ss:.3f}"
        bar.set_postfix_str(
            f"{line['tokens_per_s']:,.0f} tok/s ema_tf={progress.ema_tf:.3f} ema_ss={ema_ss} lb={result.lb:.3f}",
            refresh=False,
        )
        bar.update()


def stopped(session: Session, error: NonFiniteError, batches: int, metrics: MetricsFile) -> TrainingError:
    """Save the last good state (before the step, or after its teacher-forced update if that was good) and name it."""
    number = session.progress.step + 1
    if error.partial is not None:
        record(session, error.partial.result, batches, None, metrics)
    if session.progress.step:
        save(session, metrics)
    kept = (
        f"{session.configuration.checkpoint} holds step {session.progress.step}"
        if session.progress.step
        else "nothing was trained"
    )
    return TrainingError(
        f"step {number}: {error}; stopped before that update, {kept}; lower --lr or look at the data there"
    )


def moving_average(average: float | None, value: float) -> float:
    """``0.98 * average + 0.02 * value``, the value itself at first."""
    return value if average is None else EMA_DECAY * average + (1 - EMA_DECAY) * value


def peak_bytes(device: torch.device) -> int | None:
    """The allocator's high-water mark on CUDA, the kernel's for this process on Linux, None where neither is known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii").splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
