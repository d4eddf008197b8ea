"""The continuous thought engine: embedding, CTE blocks, tied head, and the thought carried from call to call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fractus.block_module import CarryModule, CTEBlock
from fractus.checkpoint import SIZES, load_checkpoint, load_into
from fractus.nn.ce import chunked_cross_entropy
from fractus.operators import sampler

__all__ = ["CTEBlock", "ContinuousThoughtEngine"]

ENGINE_OPERATORS = ("attention", "moe", "block", "cross_entropy", "sampler")
CE_CHUNK = 2048


class ContinuousThoughtEngine(CarryModule):
    """A language model that keeps its thought, attention state and phases between calls.

    ``observe.weight`` and ``output_head.weight`` are one tensor. ``reset_thought(batch)`` sizes the carry; a call with
    another batch is a ``ValueError``. Sizes out of range are a ``ValueError``.
    """

    last_lb_loss: Tensor
    thought_state: Tensor

    def __init__(
        self,
        vocab_size: int = 50257,
        d_model: int = 256,
        n_layers: int = 1,
        n_heads: int = 4,
        d_head: int = 64,
        n_levels: int = 2,
        n_oscillators: int = 16,
        coupling_rank: int = 8,
        n_experts: int = 8,
        top_k: int = 2,
        expert_d_ff: int = 256,
        siren_rank: int = 32,
    ) -> None:
        super().__init__()
        if vocab_size < 1 or n_layers < 1:
            raise ValueError(f"vocab_size and n_layers must be at least 1, not {vocab_size} and {n_layers}")
        self.config = {
            "vocab_size": vocab_size,
            "d_model": d_model,
            "n_layers": n_layers,
            "n_heads": n_heads,
            "d_head": d_head,
            "n_levels": n_levels,
            "n_oscillators": n_oscillators,
            "coupling_rank": coupling_rank,
            "n_experts": n_experts,
            "top_k": top_k,
            "expert_d_ff": expert_d_ff,
            "siren_rank": siren_rank,
        }
        self.chosen: Mapping[str, Callable[..., Any]] = {}
        self.register_buffer("last_lb_loss", torch.zeros(()))
        self.register_buffer("thought_state", torch.zeros(1, 1, d_model))
        self.observe = nn.Embedding(vocab_size, d_model)
        sizes = (n_heads, d_head, n_levels, n_oscillators, coupling_rank, n_experts, top_k, expert_d_ff, siren_rank)
        self.blocks = nn.ModuleList(CTEBlock(d_model, *sizes) for _ in range(n_layers))
        self.confidence_head = nn.Linear(d_model, 1)
        self.output_head = nn.Linear(d_model, vocab_size, bias=False)
        self.output_head.weight = self.observe.weight
        self.salience_head = nn.Linear(d_model, 1)

    @classmethod
    def from_pretrained(cls, path: str | Path, map_location: str | torch.device = "cpu") -> ContinuousThoughtEngine:
        """An engine of the checkpoint's config with its weights and its carry's first row; errors as the loader's."""
        state, config = load_checkpoint(path, map_location)
        engine = cls(**{name: config[name] for name in SIZES if name in config}).to(map_location)
        load_into(engine, state)
        return engine

    def use(self, operators: Mapping[str, Callable[..., Any]]) -> ContinuousThoughtEngine:
        """Run on these callables (behind their contracts) and on defaults for what is not named; returns the engine.

        The defaults are the references, but for attention, which follows ``set_attention_impl``, and the
        cross-entropy, which keeps no full logits. ``data_fetch`` and ``optimizer_step`` may be there and are the
        trainer's. Replaces an earlier choice whole; ``ValueError`` for an unknown name.
        """
        known = (*ENGINE_OPERATORS, "data_fetch", "optimizer_step")
        for name in operators:
            if name not in known:
                raise ValueError(f"no operator {name!r}; there are: {', '.join(known)}")
        self.chosen = {name: operators[name] for name in ENGINE_OPERATORS if name in operators}
        for block in self.blocks:
            block.chosen = self.chosen
        return self

    def reset_thought(self, batch: int = 1) -> None:
        """Zero every carry and size it to ``batch`` rows; ``ValueError`` below 1."""
        self.reset_state(batch)

    def reset_state(self, batch: int = 1) -> None:
        """As ``reset_thought``."""
        if batch < 1:
            raise ValueError(f"batch must be at least 1, not {batch}")
        self.thought_state = self.thought_state.new_zeros(batch, 1, self.thought_state.shape[-1])
        for block in self.blocks:
            block.reset_state(batch)

    def tick_chunk_core(self, tokens: Tensor, block_ckpt: bool = False) -> tuple[Tensor, Tensor]:
        """tokens (B,C) -> (hidden (B,C,D), total load-balance loss ()), advancing the carry and the thought."""
        if tokens.dim() != 2 or 0 in tokens.shape or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"tokens must be (B, C) integers, not {tuple(tokens.shape)} {tokens.dtype}")
        self._check_batch(tokens.shape[0])
        embedded = self.observe(tokens)
        h = torch.cat([embedded[:, :1] + self.thought_state, embedded[:, 1:]], 1)
        total = h.new_zeros(())
        for block in self.blocks:
            h, balance = block.tick_chunk_core(h, block_ckpt)
            total = total + balance
        self.thought_state = h[:, -1:].detach().clone()
        self.last_lb_loss = total.detach()
        return h, total

    def tick_chunk(self, tokens: Tensor) -> Tensor:
        """tokens (B,C) -> logits (B,C,V), advancing the carry."""
        return self.output_head(self.tick_chunk_core(tokens)[0])

    def tick_chunk_train(self, tokens: Tensor, block_ckpt: bool = False) -> tuple[Tensor, Tensor]:
        """tokens (B,C) -> (logits (B,C,V), total load-balance loss () in the graph), advancing the carry."""
        hidden, total = self.tick_chunk_core(tokens, block_ckpt)
        return self.output_head(hidden), total

    def tick_chunk_train_last(self, tokens: Tensor, block_ckpt: bool = False) -> tuple[Tensor, Tensor]:
        """tokens (B,C) -> (logits of the last position (B,V), total load-balance loss ()): head-partial training."""
        hidden, total = self.tick_chunk_core(tokens, block_ckpt)
        return self.output_head(hidden[:, -1]), total

    def tick_chunk_train_ce(
        self,
        tokens: Tensor,
        targets: Tensor,
        return_hidden: bool = False,
        ce_chunk: int | None = None,
        block_ckpt: bool = False,
    ) -> tuple[Tensor, ...]:
        """tokens, targets (B,C) -> (mean cross-entropy (), total load-balance loss ()[, hidden (B,C,D)]).

        ``ce_chunk`` rows of logits exist at a time (2048 where neither it nor a cross_entropy operator is chosen).
        """
        if targets.shape != tokens.shape:
            raise ValueError(f"targets must have the shape of tokens {tuple(tokens.shape)}, not {tuple(targets.shape)}")
        hidden, total = self.tick_chunk_core(tokens, block_ckpt)
        chosen = self.chosen.get("cross_entropy") if ce_chunk is None else None
        if chosen is None:
            loss = chunked_cross_entropy(hidden, self.observe.weight, targets.long(), ce_chunk or CE_CHUNK)
        else:
            loss = chosen(hidden.reshape(-1, hidden.shape[-1]), self.observe.weight, targets.reshape(-1).long())
        return (loss, total, hidden) if return_hidden else (loss, total)

    def sample_tokens(self, hidden: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
        """One token a position from softmax(logits / temperature): hidden (B,C,D) -> (B,C) int64."""
        draw = self.chosen.get("sampler") or functools.partial(sampler.sampler, sampler.dense)
        rows = hidden.detach().reshape(-1, hidden.shape[-1])
        return draw(rows, self.observe.weight.detach(), temperature, generator).reshape(hidden.shape[:-1])

    def tick(self, token: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """token (B) or None to think on without one -> (logits (B,V), confidence (B)), advancing the carry."""
        h = self.thought_state
        if token is not None:
            if token.dim() != 1 or token.dtype not in (torch.int64, torch.int32):
                raise ValueError(f"token must be (B,) integers or None, not {tuple(token.shape)} {token.dtype}")
            self._check_batch(token.shape[0])
            h = h + self.observe(token).unsqueeze(1)
        h = self.tick_single(h)
        self.thought_state = h.detach().clone()
        last = h[:, 0]
        return self.output_head(last), torch.sigmoid(self.confidence_head(last)).squeeze(-1)

    def tick_single(self, h: Tensor) -> Tensor:
        """h (B,1,D) through all blocks as one token -> (B,1,D), advancing their carry but not the thought."""
        for block in self.blocks:
            h, _ = block.tick_single(h)
        return h

    def _check_batch(self, batch: int) -> None:
        carried = self.thought_state.shape[0]
        if batch != carried:
            raise ValueError(f"batch {batch} differs from the carry's {carried}: call reset_thought({batch}) first")
