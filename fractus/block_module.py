"""One CTE block as a module: its layers, and the carry between calls around the pure block operator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fractus.carry import to_compact, to_full
from fractus.core import BlockCarry, tick_core
from fractus.nn.attention import FractalLinearAttention, selected_attention
from fractus.nn.moe import PhaseRoutedMoE
from fractus.nn.phase_ode import KuramotoLayer
from fractus.operators.block import block, plain, recomputed
from fractus.operators.moe import gather, moe
from registry.tree import Bundle

LAYERS = ("attn", "norm_attn", "kuramoto", "norm_kur", "moe", "norm_moe")


class CarryModule(nn.Module):
    """A module whose blocks hold the attention carry compactly and name it ``attn_S`` (B,D,D) outwards."""

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As ``nn.Module``; a block's ``attn_S`` is a full copy made on the way: assign it to change it."""
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            owner, _, last = name.rpartition(".")
            yield (f"{owner}.attn_S".lstrip("."), to_full(buffer)) if last == "compact_S" else (name, buffer)


class CTEBlock(CarryModule):
    """Attention, Kuramoto clock and phase-routed experts with pre-norms, and their carry between calls.

    The carry is read before and written after the block operator, never inside it. ``attn_S`` reads and is assigned
    as (B,D,D) but held as (B,H,K,K): writing into what it returns changes nothing.
    """

    attn_z: Tensor
    compact_S: Tensor
    kuramoto_phases: Tensor

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_head: int,
        n_levels: int,
        n_oscillators: int,
        coupling_rank: int,
        n_experts: int,
        top_k: int,
        expert_d_ff: int,
        siren_rank: int = 32,
    ) -> None:
        super().__init__()
        self.attn = FractalLinearAttention(d_model, n_heads, d_head, n_levels)
        self.norm_attn = nn.LayerNorm(d_model)
        self.kuramoto = KuramotoLayer(d_model, n_oscillators, coupling_rank, n_steps=1)
        self.norm_kur = nn.LayerNorm(d_model)
        self.moe = PhaseRoutedMoE(d_model, n_experts, top_k, d_ff=expert_d_ff, expert_rank=siren_rank)
        self.norm_moe = nn.LayerNorm(d_model)
        self.chosen: Mapping[str, Callable[..., Any]] = {}
        self.register_buffer("compact_S", torch.zeros(1, n_heads, d_head, d_head), persistent=False)
        self.register_buffer("attn_z", torch.zeros(1, d_model))
        self.register_buffer("kuramoto_phases", torch.zeros(1, 1, n_oscillators))

    @property
    def attn_S(self) -> Tensor:
        """The attention state (B,D,D), block diagonal by head, a copy."""
        return to_full(self.compact_S)

    @attn_S.setter
    def attn_S(self, full: Tensor) -> None:
        self.compact_S = to_compact(full, self.attn.n_heads)

    def reset_state(self, batch: int) -> None:
        """Zero the carry and size it to ``batch`` rows; ``ValueError`` below 1."""
        if batch < 1:
            raise ValueError(f"batch must be at least 1, not {batch}")
        heads, d_head = self.attn.n_heads, self.attn.d_head
        self.compact_S = self.compact_S.new_zeros(batch, heads, d_head, d_head)
        self.attn_z = self.attn_z.new_zeros(batch, heads * d_head)
        self.kuramoto_phases = self.kuramoto_phases.new_zeros(batch, 1, self.kuramoto.n_oscillators)

    def operands(self) -> Bundle:
        """The block operator's ``parameters``: tensors by state-dict name, numbers, chosen attention and moe."""
        tensors = {
            f"{layer}.{name}": tensor for layer in LAYERS for name, tensor in _tensors(self.get_submodule(layer))
        }
        return Bundle(
            {
                **tensors,
                "n_heads": self.attn.n_heads,
                "n_levels": self.attn.n_levels,
                "top_k": self.moe.top_k,
                "concentration": self.moe.concentration,
                "attention": self.chosen.get("attention") or selected_attention(),
                "moe": self.chosen.get("moe") or functools.partial(moe, gather),
            }
        )

    def tick_chunk_core(self, h: Tensor, block_ckpt: bool = False) -> tuple[Tensor, Tensor]:
        """h (B,C,D) -> (h (B,C,D), load-balance loss ()), advancing the carry; checkpointed if asked."""
        call = self.chosen.get("block") or functools.partial(block, plain)
        arguments = (self.operands(), h, self._carry(h))
        h, balance, carry = recomputed(call, *arguments) if block_ckpt else call(*arguments)
        self._store(carry)
        return h, balance

    def tick_single(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """One token, h (B,1,D) -> (h (B,1,D), load-balance loss ()), attention at level 0, advancing the carry."""
        if h.dim() != 3 or h.shape[1] != 1:
            raise ValueError(f"h must have shape (B, 1, D), not {tuple(h.shape)}")
        h, balance, carry = tick_core(self.operands(), h, self._carry(h))
        self._store(carry)
        return h, balance

    def _carry(self, h: Tensor) -> BlockCarry:
        batch = self.compact_S.shape[0]
        if h.shape[0] != batch:
            raise ValueError(
                f"batch {h.shape[0]} differs from the carry's {batch}: call reset_state({h.shape[0]}) first"
            )
        return self.compact_S, self.attn_z.reshape(self.compact_S.shape[:3]), self.kuramoto_phases

    def _store(self, carry: BlockCarry) -> None:
        self.compact_S, z, self.kuramoto_phases = carry
        self.attn_z = z.reshape(z.shape[0], -1)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "attn_S"] = self.attn_S
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        name = prefix + "attn_S"
        full = state_dict.pop(name, None)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        expected = (self.compact_S.shape[0], self.attn.d_model, self.attn.d_model)
        if full is None:
            missing_keys.extend([name] if strict else [])
        elif tuple(full.shape) != expected:
            error_msgs.append(
                f"size mismatch for {name}: {tuple(full.shape)} in the checkpoint, {expected} in the model."
            )
        else:
            self.compact_S = to_compact(full.detach(), self.attn.n_heads).to(self.compact_S)


def _tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters(recurse=False)
    yield from layer.named_buffers(recurse=False)
