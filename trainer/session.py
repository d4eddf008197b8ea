"""From a configuration to a run that can start; whatever can be refused is refused here, before anything is written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import registry
from fractus.checkpoint import load_into
from fractus.continuous_engine import ContinuousThoughtEngine
from trainer import checkpoint, shards
from trainer.checks import (
    Progress,
    check_places,
    check_range,
    dtype_name,
    file_stamp,
    find_device,
    resolve,
)
from trainer.configuration import RunConfiguration
from trainer.errors import UsageError
from trainer.sizes import EngineSizes, load_sizes
from trainer.step import Hyper, Stepper


@dataclass
class Session:
    """A run that is ready: nothing in it was written to disk yet."""

    configuration: RunConfiguration
    sizes: EngineSizes
    device: torch.device
    operators: registry.Resolved
    shard: shards.Tokens
    engine: ContinuousThoughtEngine
    stepper: Stepper
    progress: Progress
    gate_temp: float
    origin: str
    stamp: tuple[int, int] | None

    def content(self) -> dict[str, Any]:
        """The checkpoint now: what existing tools read, and under ``trainer_state`` what an exact resume needs."""
        batch, seq = self.configuration.batch, self.configuration.seq
        config = {**self.sizes.as_dict(), "tokens_processed": self.progress.token, "step": self.progress.step}
        state = {
            **asdict(self.progress),
            "momentum": checkpoint.portable(self.stepper.momentum),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "seed": self.stepper.hyper.seed,
            "gate_temp": self.gate_temp,
            "recipe": self.operators.name,
            "operators": {name: bound.label for name, bound in self.operators.items()},
            "shard": shards.fingerprint(self.shard),
            "shard_tokens": self.shard.size,
        }
        return {
            "model_state": checkpoint.portable(self.engine.state_dict()),
            "config": {**config, "batch": batch, "seq": seq, "gate_temperature": self.gate_temp},
            "trainer_state": state,
        }


def prepare(configuration: RunConfiguration) -> Session:
    """Check everything and build the engine; ``UsageError`` for whatever the caller has to change."""
    sizes = load_sizes(configuration.size)
    device = find_device(configuration)
    operators = resolve(configuration, device)
    shard = shards.open_shard(configuration.shard)
    check_places(configuration)
    stamp = file_stamp(configuration.checkpoint)
    found = checkpoint.newest(configuration.checkpoint)
    if found is not None:
        content, source = found
    elif configuration.ckpt_in is not None:
        content, source = checkpoint.read(configuration.ckpt_in), configuration.ckpt_in
    else:
        content, source = {}, None
    state = content.get("trainer_state", {}) if found else {}
    progress = starting_point(configuration, content, state, shard, resumed=found is not None)
    check_range(configuration, shard, progress, sizes, resumed=found is not None)
    gate_temp = _kept(configuration, state, "gate_temp")
    engine = build_engine(configuration, sizes, operators, device, gate_temp)
    loaded = load_weights(engine, content, source)
    stepper = build_stepper(configuration, state, engine, operators, device)
    restore_rng(state, device)
    verb = "resumed from" if found else "weights from"
    origin = f"{verb} {source} ({loaded})" if source else f"fresh weights, seed {stepper.hyper.seed}"
    return Session(configuration, sizes, device, operators, shard, engine, stepper, progress, gate_temp, origin, stamp)


def starting_point(
    configuration: RunConfiguration,
    content: Mapping[str, Any],
    state: Mapping[str, Any],
    shard: shards.Tokens,
    *,
    resumed: bool,
) -> Progress:
    """Where to go on; the checkpoint in --out beats START_TOKEN. ``UsageError`` when it is of another shard."""
    if not resumed:
        return Progress(token=configuration.start_token)
    if not state:
        token = content.get("config", {}).get("tokens_processed")
        if token is None:
            raise UsageError(
                f"{configuration.checkpoint} does not say which token comes next; "
                "give it as --ckpt-in with --start-token, and another --out"
            )
        return Progress(token=int(token))
    if state["shard"] != shards.fingerprint(shard):
        raise UsageError(
            f"{configuration.checkpoint} was trained on another shard ({state['shard_tokens']} tokens) than "
            f"{configuration.shard} ({shard.size} tokens); give that shard, or start on this one with "
            f"--ckpt-in {configuration.checkpoint} and another --out"
        )
    return Progress(step=state["step"], token=state["token"], ema_tf=state["ema_tf"], ema_ss=state["ema_ss"])


def _kept(configuration: RunConfiguration, state: Mapping[str, Any], name: str) -> Any:
    """A value given now, else the one that the run had, else the default."""
    return getattr(configuration, name) if name in configuration.model_fields_set or name not in state else state[name]


def build_engine(
    configuration: RunConfiguration,
    sizes: EngineSizes,
    operators: registry.Resolved,
    device: torch.device,
    gate_temp: float,
) -> ContinuousThoughtEngine:
    """Fresh weights under the seed, the recipe's operators, the gate temperature and a carry for the batch."""
    torch.manual_seed(configuration.seed)
    engine = ContinuousThoughtEngine(**sizes.as_dict())
    engine.to(device=device, dtype=torch.float64 if configuration.dtype == "float64" else torch.float32)
    engine.use(operators)
    blocks: Any = engine.blocks
    for block in blocks:
        block.moe.temperature = gate_temp
    engine.reset_thought(configuration.batch)
    return engine


def load_weights(engine: ContinuousThoughtEngine, content: Mapping[str, Any], source: Path | None) -> str:
    """Load the checkpoint's tensors and say what became of them; ``UsageError`` when it is of another architecture."""
    if source is None:
        return ""
    try:
        return str(load_into(engine, content["model_state"], content["config"]))
    except ValueError as error:
        raise UsageError(f"{source}: {error}; give the --size that it was made with") from None


def build_stepper(
    configuration: RunConfiguration,
    state: Mapping[str, Any],
    engine: ContinuousThoughtEngine,
    operators: registry.Resolved,
    device: torch.device,
) -> Stepper:
    """The training step, with the checkpoint's momentum and seed when there is one."""
    parameters = dict(engine.named_parameters())
    momentum = {n: state["momentum"][n].to(p) for n, p in parameters.items() if n in state.get("momentum", {})}
    hyper = Hyper(
        lr=configuration.lr,
        ss_rate=configuration.ss_rate,
        ss_prob=configuration.ss_prob,
        lb_coef=configuration.lb_coef,
        seed=_kept(configuration, state, "seed"),
    )
    return Stepper(
        engine=engine,
        parameters=parameters,
        sampler=operators["sampler"],
        optimizer_step=operators["optimizer_step"],
        hyper=hyper,
        device=device,
        autocast=dtype_name(configuration, device) == "bfloat16_autocast",
        momentum=momentum,
    )


def restore_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Put torch's own random streams where the checkpoint left them; the step's draws do not come from them."""
    if "torch_rng" in state:
        torch.set_rng_state(state["torch_rng"])
    if state.get("cuda_rng") is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda_rng"], device)


def check_room(session: Session) -> None:
    """Raise ``UsageError`` when the disk cannot hold two checkpoints more; the first save would find out too late."""
    tensors = [*session.engine.state_dict().values(), *session.stepper.momentum.values()]
    needed = 2 * sum(each.nbytes for each in tensors)
    folder = session.configuration.checkpoint.parent.absolute()
    free = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free
    if free < needed:
        raise UsageError(f"{folder} has {free / 2**30:.1f} GiB free; two checkpoints need {needed / 2**30:.1f} GiB")
