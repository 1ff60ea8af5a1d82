"""Flags that the commands share, and what they mean."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch

from paracore.errors import UsageError
from paracore.nn.config import DecoderConfig
from paracore.ops.ring_attention import STRATEGIES
from paracore.parallel.layout import parse_layout
from paracore.parallel.mesh import MeshShape
from paracore.parallel.overlap import Overlap


def add_mesh_flags(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the mesh axes, and how ranks run."""
    group = parser.add_argument_group("mesh")
    group.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default 1)")
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="between tensor-parallel regions each rank of tp holds its part of the tokens",
    )
    group.add_argument(
        "--vocab-parallel",
        action="store_true",
        help="each rank of tp holds its part of the embedding and of the LM head",
    )
    group.add_argument(
        "--overlap",
        nargs="?",
        const="auto",
        metavar="CHUNKS",
        help="with --sequence-parallel: compute on sub-chunks while others travel, CHUNKS to each rank's "
        "part of the tokens (default: by their size)",
    )
    group.add_argument("--cp", type=int, default=1, metavar="N", help="context-parallel ranks (default 1)")
    group.add_argument(
        "--layout",
        default="zigzag",
        metavar="HOW",
        help="how the sequence lies over cp: contiguous, zigzag, striped[:BLOCK] or balanced[:BLOCK], "
        "for equal work (default zigzag)",
    )
    group.add_argument(
        "--strategy", choices=STRATEGIES, default="ring", help="how keys travel over cp (default ring)"
    )
    group.add_argument("--dp", type=int, default=1, metavar="N", help="data-parallel ranks (default 1)")
    group.add_argument(
        "--zero",
        type=int,
        choices=range(4),
        metavar="STAGE",
        help="paracore's AdamW in place of torch's; over dp and cp it shards 0: nothing, 1: its states, "
        "2: gradients too, 3: parameters too",
    )
    group.add_argument("--pp", type=int, default=1, metavar="N", help="only 1 is supported so far")
    group.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    group.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="longest wait for another rank (default 600)",
    )


def mesh_shape(args: argparse.Namespace) -> MeshShape:
    """Return the mesh asked for; raise UsageError for what is not supported or not there."""
    if args.pp != 1:
        raise UsageError(f"--pp {args.pp}: only --pp 1 is supported so far; use --tp, --cp or --dp")
    parse_layout(args.layout)
    shape = MeshShape(pp=args.pp, dp=args.dp, cp=args.cp, tp=args.tp)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", shape.world_size))
    if args.device == "cuda" and torch.cuda.device_count() < local_ranks:
        raise UsageError(f"--device cuda: {torch.cuda.device_count()} GPUs for {local_ranks} local ranks")
    positive(args.timeout, flag="--timeout")
    return shape


def overlap(args: argparse.Namespace) -> Overlap | None:
    """Return how communication over tp is to overlap with products; raise UsageError where it cannot."""
    if args.overlap is None:
        return None
    if not args.sequence_parallel:
        raise UsageError("--overlap needs --sequence-parallel: nothing travels otherwise that could overlap")
    if args.overlap == "auto":
        return Overlap()
    if not args.overlap.isdecimal() or int(args.overlap) < 1:
        raise UsageError(f"--overlap {args.overlap}: must be a number of sub-chunks, at least 1, or left out")
    return Overlap(int(args.overlap))


def add_model_flags(
    parser: argparse.ArgumentParser, *, vocab_size: int, layers: int, seq_len: int, batch_size: int
) -> None:
    """Add the shape of the model and of a batch, with these defaults."""
    group = parser.add_argument_group("model")
    sizes = {
        "--hidden-size": (128, "H"),
        "--layers": (layers, "L"),
        "--heads": (8, "Hq: query heads"),
        "--kv-heads": (4, "Hkv: key/value heads"),
        "--vocab-size": (vocab_size, "V"),
        "--seq-len": (seq_len, "S: tokens of one sequence"),
        "--batch-size": (batch_size, "B: sequences of one step, for each rank of dp"),
    }
    for flag, (default, text) in sizes.items():
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default {default})")
    group.add_argument(
        "--intermediate-size", type=int, metavar="N", help="I (default pi * H, rounded up to 64)"
    )
    group.add_argument("--bias", action="store_true", help="biases in every projection")
    group.add_argument("--no-qk-norm", action="store_true", help="Llama: no norm of query and key heads")
    group.add_argument("--tie-embeddings", action="store_true", help="one matrix for embedding and LM head")
    for flag, text in (
        ("--dropout", "of the embedding and of what attention and MLP add"),
        ("--attention-dropout", "of attention's weights"),
    ):
        group.add_argument(flag, type=float, default=0.0, metavar="P", help=f"{text} (default 0)")
    group.add_argument(
        "--dtype",
        choices=("float32", "float64", "bfloat16"),
        default="float32",
        help="of weights and activations",
    )


def decoder_config(args: argparse.Namespace) -> DecoderConfig:
    """Return the model asked for; raise UsageError when it has no such shape or cannot be cut over --tp."""
    for name in ("seq_len", "batch_size"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    config = DecoderConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        intermediate_size=args.intermediate_size,
        qk_norm=not args.no_qk_norm,
        qkv_bias=args.bias,
        output_bias=args.bias,
        mlp_bias=args.bias,
        tie_word_embeddings=args.tie_embeddings,
        dropout=args.dropout,
        attention_dropout=args.attention_dropout,
    )
    config.require_tp(args.tp)
    return config


def positive(value: float, *, flag: str) -> None:
    """Raise UsageError unless `value` is finite and positive."""
    if not 0 < value < math.inf:  # also refuses NaN
        raise UsageError(f"{flag} {value}: must be positive")


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def writable(path: Path, *, flag: str) -> Path:
    """Return `path` if a file can be written there; raise UsageError otherwise."""
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {folder}")
    if path.is_dir():
        raise UsageError(f"{flag} {path}: is a folder, not a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{flag} {path}: cannot be written")
    return path
