"""A Transformer of plain torch modules, as a user might have one, a plan for it, and a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paracore.dropin.plan import Plan
from paracore.dropin.styles import ColumnParallel

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, PADDING = 17, 24, 4, 2, 6, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.k = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = (layer(x).view(B, S, -1, HEAD_DIM).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = self.q_norm(q), self.k_norm(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        z: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return z


class Block(nn.Module):
    """mix: a layer whose whole output is used; project: one that is given whole inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.up, self.down = nn.Linear(HIDDEN, 37), nn.Linear(37, HIDDEN)  # uneven over any tp
        self.mix = nn.Linear(HIDDEN, 25, bias=False)
        self.project = nn.Linear(25, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        h = self.mlp_norm(x)
        y: Tensor = x + self.down(F.gelu(self.up(h))) + self.project(self.mix(h).softmax(-1))
        return y


class Transformer(nn.Module):
    """tied: the head has the embedding's weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=PADDING)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(tied: bool, dtype: torch.dtype = torch.float64) -> Transformer:
    """The same weights on every rank and in every run; no bias 0, no norm weight 1, no zero row."""
    torch.manual_seed(0)
    model = Transformer(tied).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def plan_over(tp: int) -> Plan:
    return {
        "embed": "embedding",
        "head": "head",
        "blocks.*.attention.q": "column",
        "blocks.*.attention.[kv]": ColumnParallel(replicas=max(1, tp // KV_HEADS)),
        "**.[qk]_norm": "replicated_partial",
        "blocks.*.attention.out": "row",
        "blocks.*.up": "column",
        "blocks.*.down": "row",
        "blocks.*.mix": "column_gather",
        "blocks.*.project": "row_scatter_input",
    }


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """Tokens, padding among them, and labels of which some are ignored, unequally many in each row."""
    index = torch.arange(rows * 7).view(rows, 7)
    labels = index.mul(5).add(2).remainder(VOCABULARY)
    return index.mul(7).remainder(VOCABULARY), labels.masked_fill(index % 4 == 1, -100)


def loss_of(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    """The sum of the losses of these labels over `count`."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
