"""What `paracore bench memory` and `throughput` found: rows, and what is derived from them."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paracore.bench import published
from paracore.bench.modes import BASELINE, Workload
from paracore.bench.throughput import Samples
from paracore.ops.implementations import dtype_name

Fields = dict[str, str | int | float | bool | None]

MEMORY_UNITS = {
    "peak_mib, published_mib": "2**20 bytes of one rank",
    "saving": f"1 - peak_mib / that of {BASELINE}",
    "of_published": "peak_mib / published_mib",
    "published_recompute_mib": "published for sequence parallelism that gathers again in backward",
}
THROUGHPUT_UNITS = {
    "median_ms, p20_ms, p80_ms": "1e-3 s per step, of the slowest rank",
    "thousand_tokens_per_s": "1e3 tokens per s of all ranks together, at the median",
    "ratio": f"thousand_tokens_per_s / that of {BASELINE}",
}


def describe(workload: Workload) -> Fields:
    """Return the workload as fields of a row."""
    config = workload.config
    return {
        "layers": config.num_layers,
        "seq_len": workload.seq_len,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "intermediate_size": config.mlp_size,
        "tie_embeddings": config.tie_word_embeddings,
        "batch_size": workload.batch_size,
        "batch_policy": workload.policy,
        "dtype": dtype_name(workload.dtype),
        "ranks": workload.ranks,
    }


def title(workload: Workload) -> str:
    """Return the workload in one line."""
    config, dtype = workload.config, dtype_name(workload.dtype)
    return (
        f"{config.num_layers} layers, H={config.hidden_size} I={config.mlp_size} Hq={config.num_heads} "
        f"Hkv={config.num_kv_heads} V={config.vocab_size}{' tied' if config.tie_word_embeddings else ''} "
        f"S={workload.seq_len}, batch {workload.batch_size} {workload.policy}, {dtype}, "
        f"{workload.ranks} ranks"
    )


def published_mib(workload: Workload) -> Mapping[str, float]:
    """Return the published peaks of this workload by mode; none where it is not a published one."""
    config = workload.config
    model = (config.hidden_size, config.num_heads, config.num_kv_heads, config.mlp_size)
    theirs = (published.HIDDEN_SIZE, published.HEADS, published.KV_HEADS, published.INTERMEDIATE_SIZE)
    setting = (dtype_name(workload.dtype), workload.ranks, config.tie_word_embeddings, workload.policy)
    if model != theirs or setting != (
        published.DTYPE,
        published.RANKS,
        published.TIE_EMBEDDINGS,
        "fixed_per_rank",
    ):
        return {}
    place = published.Place(config.num_layers, workload.seq_len, config.vocab_size, workload.batch_size)
    return published.PEAK_MIB.get(place, {})


def memory_rows(workload: Workload, peaks: Mapping[str, int]) -> list[Fields]:
    """Return a row for each mode. peaks: bytes, by mode."""
    theirs = published_mib(workload)
    return [_memory_row(workload, name, peaks, theirs) for name in peaks]


def _memory_row(
    workload: Workload, name: str, peaks: Mapping[str, int], theirs: Mapping[str, float]
) -> Fields:
    mib = peaks[name] / 2**20
    recompute = theirs.get(published.RECOMPUTE) if name == "tp_sp" else None
    return describe(workload) | {
        "mode": name,
        "peak_mib": mib,
        "saving": 1 - peaks[name] / peaks[BASELINE] if BASELINE in peaks else None,
        "published_mib": theirs.get(name),
        "of_published": mib / theirs[name] if name in theirs else None,
        "published_recompute_mib": recompute,
        "of_published_recompute": None if recompute is None else mib / recompute,
    }


def throughput_rows(workload: Workload, samples: Samples) -> list[Fields]:
    """Return a row for each mode."""
    median = {name: statistics.median(seconds) for name, seconds in samples.items()}
    rate = {name: workload.tokens(name) / seconds for name, seconds in median.items()}
    return [
        describe(workload)
        | {
            "mode": name,
            "steps": len(seconds),
            "tokens": workload.tokens(name),
            "median_ms": 1e3 * median[name],
            "p20_ms": 1e3 * float(np.percentile(seconds, 20)),
            "p80_ms": 1e3 * float(np.percentile(seconds, 80)),
            "thousand_tokens_per_s": rate[name] / 1e3,
            "ratio": rate[name] / rate[BASELINE] if BASELINE in rate else None,
        }
        for name, seconds in samples.items()
    ]


def write_csv(path: Path, rows: Sequence[Fields]) -> None:
    """Write a line per row."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_json(
    path: Path, machine: dict[str, Any], case: str, units: Mapping[str, str], rows: Sequence[Fields]
) -> None:
    """Write everything there is to know about a run."""
    document = {"machine": machine, "case": case, "units": dict(units), "results": list(rows)}
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
