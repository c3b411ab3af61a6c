"""A small GPT: token and position embeddings, pre-norm blocks, one tied output matrix. Nothing elastic in here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    vocab_size: int
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 128
    seq_length: int = 128
    dropout: float = 0.0


class ByHead(nn.Module):
    """Queries, keys and values, head by head: of all heads, or of those that this rank has."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, qkv: Tensor) -> Tensor:
        batch, length, width = qkv.shape
        return qkv.view(batch, length, 3, self.heads, width // (3 * self.heads))


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.dropout = config.dropout
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.by_head = ByHead(config.n_head)
        self.attention_out = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(config.dropout)
        self.checkpoints_activations = False

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints_activations:
            return cast(Tensor, checkpoint(self._compute, x, use_reentrant=False))
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        x = x + self.drop(self._attend(self.before_attention(x)))
        return cast(Tensor, x + self.drop(self.mlp_out(functional.gelu(self.mlp_in(self.before_mlp(x))))))

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = self.by_head(self.qkv(x)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return cast(Tensor, self.attention_out(mixed.transpose(1, 2).flatten(2)))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.seq_length, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialize)

    def gradient_checkpointing_enable(self) -> None:
        """Compute activations again in the backward pass instead of keeping them: less memory, more time."""
        for block in cast("list[Block]", self.blocks):
            block.checkpoints_activations = True

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean loss over labelled tokens; without labels, the logits."""
        at = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.drop(self.tokens(input_ids) + self.positions(at))
        for block in self.blocks:
            x = block(x)
        logits = cast(Tensor, self.head(self.norm(x)))
        if labels is None:
            return logits
        return functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED_LABEL
        )

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            residual = module.weight.shape[0] == self.config.n_embd and isinstance(module, nn.Linear)
            scale = 0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02
            nn.init.normal_(module.weight, std=scale)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
