"""The engine's sizes: the two built-in ones, or a flat TOML file of the same names."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from trainer.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """The arguments of ``ContinuousThoughtEngine``, positive integers (``siren_rank`` may be 0: dense experts)."""

    vocab_size: int = 50257
    d_model: int = 1280
    n_layers: int = 16
    n_heads: int = 20
    d_head: int = 64
    n_levels: int = 2
    n_oscillators: int = 16
    coupling_rank: int = 8
    n_experts: int = 128
    top_k: int = 2
    expert_d_ff: int = 2048
    siren_rank: int = 64

    def __post_init__(self) -> None:
        for name, value in self.as_dict().items():
            least = 0 if name == "siren_rank" else 1
            if type(value) is not int or value < least:
                raise ValueError(f"{name} has to be an integer of at least {least}, not {value!r}")
        if self.n_heads * self.d_head != self.d_model:
            raise ValueError(f"d_model has to be n_heads * d_head = {self.n_heads * self.d_head}, not {self.d_model}")
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k = {self.top_k} is more than n_experts = {self.n_experts}")

    def as_dict(self) -> dict[str, int]:
        """The sizes by name, as a checkpoint's config holds them."""
        return asdict(self)


BUILT_IN = {
    "1b": EngineSizes(),
    "tiny": EngineSizes(
        d_model=64,
        n_layers=2,
        n_heads=4,
        d_head=16,
        n_oscillators=8,
        coupling_rank=4,
        n_experts=8,
        expert_d_ff=128,
        siren_rank=16,
    ),
}


def load_sizes(spec: str) -> EngineSizes:
    """The built-in sizes of that name or those of a TOML file; ``UsageError`` names what is wrong in it."""
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    path = Path(spec)
    if not path.is_file():
        raise UsageError(f"no size {spec!r}: it is {', '.join(BUILT_IN)} or a TOML file with {', '.join(_names())}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    for name in table:
        if name not in _names():
            near = difflib.get_close_matches(name, _names(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"{path}: no size {name!r}{hint} (there are: {', '.join(_names())})")
    try:
        return EngineSizes(**table)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


def _names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(EngineSizes))
