"""Figures that a tutorial's full series publishes, for our own to be compared with; numbers only.

Two RTX 4090D over PCIe, bfloat16, hidden size 768, 8 query and 4 key/value heads, intermediate size 2432,
torch's AdamW and DistributedDataParallel. MiB are the most that torch's allocator of CUDA had handed out on a
rank, with a batch for each copy of the model.

Embedding and LM head are two matrices there, as the figures tell. Over the vocabulary scan TP grows by 72.9
KiB with each word, and TP+VP by half of it. Four buffers of logits, [4, 2048, V] in bfloat16, are 64 KiB of
that, two matrices with two moments each are 9: 73.0 together; one matrix would make 68.5. DDP grows by 76.1
KiB: with the gradients of two matrices in its buckets that makes 76.0, with one 70.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

HIDDEN_SIZE, HEADS, KV_HEADS, INTERMEDIATE_SIZE = 768, 8, 4, 2432
DTYPE, RANKS, TIE_EMBEDDINGS = "bfloat16", 2, False


class Place(NamedTuple):
    """What varies among the published configurations."""

    layers: int
    seq_len: int
    vocab_size: int
    batch_size: int


RECOMPUTE = "tp_sp_recompute"
"""Sequence parallelism that keeps shards and gathers them again in backward, as ours and "all" do."""

_COLUMNS = ("ddp", "tp", "tp_sp", RECOMPUTE, "tp_vp", "all")


def _rows(columns: tuple[str, ...], *rows: tuple[Place, tuple[float, ...]]) -> dict[Place, dict[str, float]]:
    return {place: dict(zip(columns, figures, strict=True)) for place, figures in rows}


PEAK_MIB: Mapping[Place, Mapping[str, float]] = {
    **_rows(
        _COLUMNS[:3],
        (Place(8, 2048, 6400, 2), (2377.65, 1509.53, 1447.99)),
        (Place(16, 2048, 6400, 2), (4433.28, 2717.69, 2608.19)),
        (Place(32, 2048, 6400, 2), (8549.79, 5129.40, 4925.45)),
        (Place(64, 2048, 6400, 2), (16766.42, 9956.83, 9560.83)),
    ),
    **_rows(
        _COLUMNS,
        (Place(2, 2048, 6400, 4), (1452.19, 1097.94, 1052.08, 956.73, 867.23, 719.59)),
        (Place(4, 2048, 6400, 4), (2350.91, 1658.71, 1588.95, 1398.82, 1427.88, 1163.93)),
        (Place(8, 2048, 6400, 4), (4148.79, 2781.92, 2665.97, 2282.97, 2554.47, 2048.08)),
        (Place(16, 2048, 6400, 4), (7745.10, 5026.93, 4824.38, 4056.38, 4796.54, 3816.55)),
        (Place(32, 2048, 6400, 4), (14937.42, 9521.13, 9136.96, 7600.27, 9291.74, 7364.60)),
        (Place(8, 1024, 6400, 4), (2378.46, 1509.15, 1447.62, 1260.08, 1385.84, 1131.15)),
        (Place(8, 4096, 6400, 4), (7751.45, 5268.23, 5027.70, 4259.70, 4839.45, 3819.76)),
        (Place(8, 8192, 6400, 4), (14954.20, 10292.70, 9811.70, 8275.70, 9464.89, 7424.67)),
    ),
    **_rows(
        ("ddp", "tp", "tp_vp"),
        (Place(8, 2048, 12800, 4), (4625.41, 3237.01, 2782.34)),
        (Place(8, 2048, 25600, 4), (5577.66, 4147.36, 3237.44)),
        (Place(8, 2048, 51200, 4), (7476.97, 5971.36, 4144.78)),
    ),
}
