"""Train a Qwen3 of transformers on long rows of packed documents, each row dealt out to several ranks.

    torchrun --nproc-per-node 2 examples/long_context_qwen3.py --cp 2
    torchrun --nproc-per-node 8 examples/long_context_qwen3.py --cp 8 --model path/to/Qwen3-0.6B \
        --sequence 131072 --dtype bfloat16 --checkpointing --out tuned

Without --model the model is a little one with random weights that reads bytes. With it, a directory that
`save_pretrained` or a download left, each rank reads its own part of the weights. The documents are the files
of Python's standard library, or those given by --text. Attention sees each document alone, and its ranks
share the work evenly whatever the lengths of the documents are ("balanced"). Ranks that cp and tp do not take
are dp, and train on rows of their own.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config

import paracore
from paracore.data import BYTE_VOCABULARY, standard_library_sources


def little_config() -> Qwen3Config:
    """Return the configuration of a model that trains on a laptop."""
    return Qwen3Config(
        vocab_size=BYTE_VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )


def packed_rows(
    files: list[Path], tokenize: Callable[[str], list[int]], length: int, first: int, stride: int
) -> Iterator[dict[str, Tensor]]:
    """Yield rows [1, length] of whole documents one behind another; the last of a row is cut off.

    Rows are dealt out: this takes number first, first + stride, ... Positions begin anew with each document,
    which is how attention knows them, and no document's first token is to be foretold from the one before.
    """
    number, row = 0, []
    while True:
        for file in files:
            row.append(torch.tensor(tokenize(file.read_text(encoding="utf-8", errors="replace"))[:length]))
            if sum(map(len, row)) < length:
                continue
            if number % stride == first:
                labels = [torch.cat((document.new_full((1,), -100), document[1:])) for document in row]
                yield {
                    "input_ids": torch.cat(row)[None, :length],
                    "position_ids": torch.cat([torch.arange(len(document)) for document in row])[
                        None, :length
                    ],
                    "labels": torch.cat(labels)[None, :length],
                }
            number, row = number + 1, []


def build(options: argparse.Namespace) -> tuple[Any, Callable[[str], list[int]]]:
    """Return the model, without weights where a checkpoint has them, and what makes tokens of text."""
    dtype = getattr(torch, options.dtype)
    if options.model is None:
        torch.manual_seed(options.seed)  # the same weights on every rank
        model = AutoModelForCausalLM.from_config(little_config(), dtype=dtype)
        return model, lambda text: list(text.encode())
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model), dtype=dtype)
    return model, lambda text: list(tokenizer(text, verbose=False)["input_ids"])


def train(options: argparse.Namespace, device: torch.device) -> list[float]:
    """Train over all ranks; return the loss of each step."""
    dp_size, rest = divmod(dist.get_world_size(), options.cp * options.tp)
    if rest:
        raise SystemExit(f"cp * tp = {options.cp * options.tp} does not divide {dist.get_world_size()} ranks")
    mesh = init_device_mesh(device.type, (dp_size, options.cp, options.tp), mesh_dim_names=("dp", "cp", "tp"))
    model, tokenize = build(options)
    if options.model is None:
        model.to(device)
    model.train()
    parallel = paracore.parallelize(
        model, mesh, layout=options.layout, zero=options.zero, weights=options.model
    )
    if options.checkpointing:
        model.activation_checkpointing_enable()
    optimizer = parallel.optimizer(lr=options.lr, max_norm=1.0)
    if dist.get_rank() == 0:
        print(parallel)

    files = options.text or standard_library_sources()
    # Every rank of cp and tp is given the same whole row.
    rows = packed_rows(files, tokenize, options.sequence, mesh["dp"].get_local_rank(), dp_size)
    losses = []
    for step in range(options.steps):
        begin = time.perf_counter()
        row = {name: tensor.to(device) for name, tensor in next(rows).items()}
        loss = model(**row).loss  # the mean over the labels of all ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            speed = dp_size * options.sequence / (time.perf_counter() - begin)
            print(f"step {step}: loss {losses[-1]:.6f}, {speed:.0f} tokens/s")
    if options.out is not None:
        weights = parallel.full_state_dict("cpu")
        if dist.get_rank() == 0:
            model.save_pretrained(options.out, state_dict=weights)
    return losses


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cp", type=int, default=1, help="ranks that share each row")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--zero", type=int, default=1, choices=[0, 1, 2, 3], help="what dp and cp shard")
    parser.add_argument("--layout", default="balanced", help="contiguous, zigzag, striped or balanced")
    parser.add_argument("--model", type=Path, help="a directory with a Qwen3 and its tokenizer")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--text", type=Path, nargs="*", help="files, each of them a document")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens in a row")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again in backward")
    parser.add_argument("--out", type=Path, help="a directory to save the tuned model to")
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
