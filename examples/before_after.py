"""A model of transformers as it is, and after one line: the same loss, in less time and memory.

    python examples/before_after.py
    python examples/before_after.py --dtype bfloat16 --layers 28 --hidden 1024 --vocabulary 151936

The model has the shape of a Qwen3 and random weights. Time and memory are those of one training step without
the optimizer: forward with the loss, and backward. `paracore bench fuse` measures the same with more care.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import paracore
from paracore.bench.memory import peak_bytes


def build(options: argparse.Namespace) -> nn.Module:
    """Return the model, as transformers makes it."""
    heads = max(1, options.hidden // 64)
    config = Qwen3Config(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=64,
        vocab_size=options.vocabulary,
        max_position_embeddings=options.sequence,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model: nn.Module = Qwen3ForCausalLM(config)
    return model.to(options.device, getattr(torch, options.dtype)).train()


def step(model: nn.Module, tokens: Tensor) -> float:
    """Forward and backward; return the loss."""
    model.zero_grad()
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item()


def measure(model: nn.Module, tokens: Tensor, steps: int) -> tuple[float, float, float]:
    """Return the loss, the seconds of the fastest step, and the most MiB that a step holds at once."""
    peak = peak_bytes(lambda: step(model, tokens), tokens.device)
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        loss = step(model, tokens)  # waits for a GPU, to read the loss
        seconds.append(time.perf_counter() - begin)
    return loss, min(seconds), peak / 2**20


def main() -> None:
    """Measure before, fuse, measure after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    model = build(options)
    tokens = torch.randint(options.vocabulary, (options.batch, options.sequence), device=options.device)
    before = measure(model, tokens, options.steps)

    report = paracore.fuse(model)  # the one line

    after = measure(model, tokens, options.steps)
    print(report)
    for name, (loss, seconds, mib) in (("before", before), ("after", after)):
        print(f"{name}: loss {loss:.6f}, {seconds:.4f} s and {mib:.0f} MiB a step")
    print(
        f"the loss differs by {abs(after[0] - before[0]):.1e}, the step is {before[1] / after[1]:.2f} times "
        f"as fast, with {after[2] / before[2]:.2f} of the memory"
    )


if __name__ == "__main__":
    main()
