"""The run's configuration: command line over environment over default, resolved and checked once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from trainer.errors import UsageError


class RunConfiguration(BaseSettings):
    """What ``trainer run`` was asked for; the aliases are the names in the environment that launch scripts use."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, case_sensitive=True, env_ignore_empty=True
    )

    shard: Path = Field(validation_alias="SHARD", description="flat int32 .npy of token ids")
    out: Path | None = Field(
        None, description="folder of the checkpoint and metrics.jsonl (default: CKPT_OUT without its suffix)"
    )
    size: str = Field("1b", description="tiny, 1b or a TOML file of engine sizes")
    recipe: str = Field("production", description="reference, production, auto, a TOML file or operator=variant,...")
    device: str | None = Field(None, description="cpu, cuda or cuda:N (default: cuda when there, else cpu)")
    dtype: str | None = Field(
        None, description="float32, float64 or bfloat16_autocast (default: float32, on cuda bfloat16_autocast)"
    )
    steps: int | None = Field(
        None, ge=1, description="steps of the whole run, resumed ones included (default: to the shard's end)"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="of fresh weights, sampling decisions and samples")
    save_every: int = Field(800, ge=1, description="steps between checkpoints")
    ledger: Path | None = Field(None, description="folder of proofs (default: the checkout's)")
    gpu_id: int | None = Field(
        None, ge=0, validation_alias="GPU_ID", description="cuda device where CUDA_VISIBLE_DEVICES is not set"
    )
    batch: int = Field(2, ge=1, validation_alias="BATCH", description="lanes")
    seq: int = Field(128, ge=1, validation_alias="SEQ", description="tokens of a lane's chunk")
    lr: float = Field(7e-4, gt=0, allow_inf_nan=False, validation_alias="LR", description="learning rate")
    ss_rate: float = Field(
        0.25, ge=0, le=1, validation_alias="SS_RATE", description="probability of a scheduled-sampling pass"
    )
    ss_prob: float = Field(
        0.2, ge=0, le=1, validation_alias="SS_PROB", description="probability that a position takes its sample"
    )
    lb_coef: float = Field(
        0.02, ge=0, allow_inf_nan=False, validation_alias="LB_COEF", description="weight of the load-balance loss"
    )
    gate_temp: float = Field(
        2.5, gt=0, allow_inf_nan=False, validation_alias="GATE_TEMP", description="temperature of the experts' gates"
    )
    start_token: int = Field(0, ge=0, validation_alias="START_TOKEN", description="first token of a fresh run")
    ckpt_in: Path | None = Field(None, validation_alias="CKPT_IN", description="weights of a fresh run")
    ckpt_out: Path | None = Field(
        None, validation_alias="CKPT_OUT", description="the checkpoint (default: OUT/checkpoint.pt)"
    )
    accum: int = Field(
        1, ge=1, validation_alias="ACCUM", description="batches an update; above 1 deviates from the v1 semantics"
    )
    ce_chunk: int | None = Field(
        None, ge=0, validation_alias="CE_CHUNK", description="cross_entropy=chunked of that size; 0: dense"
    )
    attn_impl: str | None = Field(None, validation_alias="FRACTUS_ATTN_IMPL", description="attention variant")
    block_ckpt: bool | None = Field(
        None, validation_alias="BLOCK_CKPT", description="1: block=checkpointed, 0: block=plain"
    )
    compile_blocks: bool = Field(False, validation_alias="COMPILE", description="compiled blocks; not available yet")

    @property
    def folder(self) -> Path:
        """Where metrics.jsonl goes."""
        if self.out is not None:
            return self.out
        assert self.ckpt_out is not None
        return self.ckpt_out.with_suffix("")

    @property
    def checkpoint(self) -> Path:
        """Where the checkpoint goes."""
        return self.ckpt_out if self.ckpt_out is not None else self.folder / "checkpoint.pt"

    @property
    def recipe_spec(self) -> str:
        """The recipe with the older switches as overrides, but for operators that the recipe itself names."""
        named = {part.partition("=")[0].strip() for part in self.recipe.split(",") if "=" in part}
        overrides = {}
        if self.attn_impl is not None:
            overrides["attention"] = self.attn_impl
        if self.block_ckpt is not None:
            overrides["block"] = "checkpointed" if self.block_ckpt else "plain"
        if self.ce_chunk is not None:
            overrides["cross_entropy"] = f"chunked:ce_chunk={self.ce_chunk}" if self.ce_chunk else "dense"
        return ",".join(
            [self.recipe, *(f"{name}={variant}" for name, variant in overrides.items() if name not in named)]
        )

    @property
    def batch_tokens(self) -> int:
        """Tokens that one batch advances by."""
        return self.batch * self.seq


def spelled(name: str) -> str:
    """How a field is given: ``--batch (or BATCH)``."""
    alias = RunConfiguration.model_fields[name].validation_alias
    flag = f"--{name.replace('_', '-')}"
    return f"{flag} (or {alias})" if alias else flag


def configure(given: dict[str, Any]) -> RunConfiguration:
    """The command line's values over the environment's over the defaults; ``UsageError`` names the first wrong one."""
    try:
        configuration = RunConfiguration(**given)
    except ValidationError as error:
        raise UsageError(_sentence(error)) from None
    if configuration.out is None and configuration.ckpt_out is None:
        raise UsageError("give --out DIR, the folder for the checkpoint and metrics.jsonl (or CKPT_OUT)")
    if configuration.compile_blocks:
        raise UsageError("COMPILE=1: compiled blocks are not available yet; leave COMPILE out or set COMPILE=0")
    return configuration


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    names = {str(f.validation_alias or n): n for n, f in RunConfiguration.model_fields.items()}
    name = str(first["loc"][0])
    name = names.get(name, name)
    if first["type"] == "missing":
        return f"give {spelled(name)}: {RunConfiguration.model_fields[name].description}"
    problem = first["msg"].removeprefix("Input ").partition(", unable")[0]
    return f"{spelled(name)} {problem}, not {first['input']!r} ({RunConfiguration.model_fields[name].description})"
