"""A decoder of plain torch modules, made parallel by a plan, and trained by a plain loop.

    torchrun --nproc-per-node 2 examples/train_plain_torch.py --tp 2
    torchrun --nproc-per-node 4 examples/train_plain_torch.py --tp 2 --zero 1    # dp=2, tp=2

The model knows nothing of paracore. It learns the bytes of Python's standard library. Ranks that tp does not
take are dp. The losses are the same for any number of ranks, as long as --batch, which all share, is.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import paracore
from paracore.data import BYTE_VOCABULARY, ByteCorpus, standard_library_sources

HEAD_DIM = 16


class Attention(nn.Module):
    """Causal attention of grouped heads. The heads are as many as the projections give: a rank's own."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, hidden // 2, bias=False)
        self.v = nn.Linear(hidden, hidden // 2, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, H]."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        z: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return z


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention = Attention(hidden)
        self.gate, self.up = (nn.Linear(hidden, 3 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, H]."""
        x = x + self.attention(self.attention_norm(x))
        h = self.mlp_norm(x)
        y: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return y


class Decoder(nn.Module):
    """Tokens [B, S] -> logits [B, S, V]."""

    def __init__(self, layers: int, hidden: int, sequence: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTE_VOCABULARY, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, BYTE_VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [B, S]."""
        x = self.embed(tokens) + self.positions.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


# Which modules lie over tp, and how; all others are whole on every rank.
PLAN = {
    "embed": "embedding",
    "blocks.*.attention.[qkv]": "column",
    "blocks.*.attention.out": "row",
    "blocks.*.gate": "column",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": "head",
}


def train(options: argparse.Namespace, device: torch.device) -> list[float]:
    """Train over all ranks; return the loss of each step."""
    dp_size, rest = divmod(dist.get_world_size(), options.tp)
    if rest:
        raise SystemExit(f"tp = {options.tp} does not divide {dist.get_world_size()} ranks")
    mesh = init_device_mesh(device.type, (dp_size, options.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(options.seed)  # the same weights on every rank: each keeps its part
    model = Decoder(options.layers, options.hidden, options.sequence).to(device)
    parallel = paracore.parallelize(model, mesh, PLAN, zero=options.zero)
    optimizer = parallel.optimizer(lr=options.lr, max_norm=1.0)
    if dist.get_rank() == 0:
        print(parallel)

    corpus = ByteCorpus(standard_library_sources(), options.sequence)
    dp, losses = mesh["dp"], []
    for step in range(options.steps):
        batch = corpus.training_batch(step, options.batch, options.seed)
        tokens, labels = (x.tensor_split(dp_size)[dp.get_local_rank()].to(device) for x in batch)
        logits = model(tokens).flatten(0, 1)
        # Gradients are summed over dp: divide by the labels of all ranks.
        loss = F.cross_entropy(logits.float(), labels.flatten(), reduction="sum") / batch[1].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(whole := loss.detach(), group=dp.get_group())
        losses.append(whole.item())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.6f}")
    return losses


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--zero", type=int, default=0, choices=[0, 1, 2, 3], help="what dp shards")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128, help=f"a multiple of {2 * HEAD_DIM}")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step, of all ranks together")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    """Join the ranks of torchrun, and train."""
    options = parse()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
