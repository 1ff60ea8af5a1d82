"""`paracore bench memory`: what it predicts is what training takes, and less than what others publish."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker

from paracore import attention
from paracore.bench import published
from paracore.bench.modes import MODES, Workload
from paracore.bench.peak_memory import STEPS, predict, trace
from paracore.bench.published_table import markdown
from paracore.bench.training_report import memory_rows, published_mib
from paracore.cli.main import main
from paracore.errors import UsageError
from paracore.nn.config import DecoderConfig
from paracore.parallel.mesh import TrainingAxes
from paracore.profiling.tracker import MemoryTracker
from paracore.threads import available_cores
from paracore.training import Trainer
from tests.conftest import Launch
from tests.resident import SUPPORTED, peak_growth, return_memory_at_once

MIB = 2**20


def workload(
    *,
    layers: int = 2,
    seq_len: int = 64,
    vocab_size: int = 96,
    hidden_size: int = 64,
    batch_size: int = 2,
    policy: str = "fixed_per_rank",
    dtype: torch.dtype = torch.float32,
    ranks: int = 1,
    tied: bool = False,
) -> Workload:
    config = DecoderConfig(vocab_size, hidden_size, layers, 8, 4, tie_word_embeddings=tied)
    return Workload(config, seq_len, batch_size, policy, dtype, ranks)


def tutorial(place: published.Place) -> Workload:
    return workload(
        layers=place.layers,
        seq_len=place.seq_len,
        vocab_size=place.vocab_size,
        hidden_size=published.HIDDEN_SIZE,
        batch_size=place.batch_size,
        dtype=torch.bfloat16,
        ranks=published.RANKS,
    )


# ---------------------------------------------------------------- the prediction


def peak_by_torch(tied: bool) -> int:
    """Return the peak of tensors by torch's tracker, of real steps."""
    work, tracker = workload(tied=tied), MemTracker()
    trainer = Trainer(work.build("tp", TrainingAxes.alone(), device="cpu"), lr=1e-3)
    tokens = torch.zeros(work.batch_size, work.seq_len, dtype=torch.int64)
    labels = torch.zeros_like(tokens)
    tracker.track_external(trainer.model, tokens, labels)
    with tracker:
        for _ in range(STEPS):
            trainer.step(tokens, labels)
            tracker.reset_mod_stats()  # it takes a second call of a module for a mistake
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def peak_by_ours(tied: bool) -> int:
    """Return the peak of tensors and of what operations give back, by ours, of fake steps."""
    tracker = MemoryTracker()
    trace(workload(tied=tied), "tp", TrainingAxes.alone(), tracker)
    return tracker.peak - sum(tracker.kept)


@pytest.mark.parametrize("tied", [False, True])
def test_torchs_own_tracker_counts_the_same_tensors_of_real_steps(launch: Launch, tied: bool) -> None:
    [theirs] = launch(1, peak_by_torch, tied)
    [ours] = launch(1, peak_by_ours, tied)
    # Ours adds what operations take while they run, which may come at another time than the tensors' peak.
    assert theirs <= ours <= 1.02 * theirs


RESIDENT = workload(seq_len=1024, vocab_size=2048, hidden_size=256, batch_size=4)


def real_growth() -> int:
    def train(work: Workload) -> None:
        trainer = Trainer(work.build("tp", TrainingAxes.alone(), device="cpu"), lr=1e-3)
        tokens = torch.zeros(work.batch_size, work.seq_len, dtype=torch.int64)
        labels = torch.zeros_like(tokens)
        for _ in range(STEPS):
            trainer.step(tokens, labels)

    return_memory_at_once()
    train(workload())  # libraries and their code are there then
    return peak_growth(lambda: train(RESIDENT))


@pytest.mark.skipif(not SUPPORTED, reason="reads Linux's count of resident memory, on glibc's heap")
def test_a_real_step_grows_the_process_by_what_is_predicted(launch: Launch) -> None:
    [measured] = launch(1, real_growth)
    [predicted] = predict([(RESIDENT, "tp")], threads=1, processes=1)
    assert predicted > 200 * MIB
    # Measured: 2.5 % more, among it 7 MiB that libraries keep.
    assert 0.97 * predicted < measured < 1.05 * predicted, (predicted / MIB, measured / MIB)


def test_a_prediction_leaves_the_process_as_it_is() -> None:
    first, again = predict(
        [(workload(seq_len=48), "tp"), (workload(seq_len=48), "tp")], threads=1, processes=2
    )
    assert first == again
    assert not dist.is_initialized()
    q = torch.ones(1, 1, 48, 8)
    assert not isinstance(attention(q, q, q), torch._subclasses.FakeTensor)


def test_more_threads_of_a_rank_take_more_memory() -> None:
    job = workload(batch_size=4), "tp"
    one, two = (predict([job], threads=threads, processes=1)[0] for threads in (1, 2))
    assert one < two < 1.5 * one


# ---------------------------------------------------------------- against what is published

# What the margin is: torch's tracker came to 3.4 % less than was published for the tutorial's own model.
MARGIN = 1.034
CHECKED = {
    published.Place(2, 2048, 6400, 4): tuple(MODES),
    published.Place(4, 2048, 6400, 4): ("ddp", "all"),
    published.Place(8, 2048, 6400, 2): ("tp_sp",),
    published.Place(8, 2048, 51200, 4): ("tp_vp",),
}
COMPARED = [
    (place, name, column)
    for place, names in CHECKED.items()
    for name in names
    for column in (name, *([published.RECOMPUTE] if name == "tp_sp" else []))
    if column in published.PEAK_MIB[place]
]


@cache
def peaks() -> dict[tuple[published.Place, str], int]:
    jobs = [(place, name) for place, names in CHECKED.items() for name in names]
    found = predict([(tutorial(place), name) for place, name in jobs], threads=1, processes=available_cores())
    return dict(zip(jobs, found, strict=True))


@pytest.mark.parametrize(("place", "name", "column"), COMPARED)
def test_a_rank_takes_less_than_is_published(place: published.Place, name: str, column: str) -> None:
    assert peaks()[place, name] / MIB <= published.PEAK_MIB[place][column] / MARGIN


def test_the_published_model_has_two_matrices_for_embedding_and_head() -> None:
    small, large = (published.PEAK_MIB[published.Place(8, 2048, size, 4)] for size in (6400, 51200))
    logits = 4 * (4 * 2048 * 2)  # four buffers of bfloat16, per word
    row = 2 * published.HIDDEN_SIZE  # of a matrix, per word
    for mode, copies in (("tp", 3), ("ddp", 4)):  # itself, two moments; the gradient in a bucket
        growth = (large[mode] - small[mode]) * MIB / (51200 - 6400)
        assert (growth - logits) / (copies * row) == pytest.approx(2.0, abs=0.05)


def test_only_the_published_workload_is_compared() -> None:
    place = published.Place(8, 2048, 6400, 4)
    assert published_mib(tutorial(place))["tp"] == 2781.92
    for change in (
        {"tied": True},
        {"policy": "fixed_global"},
        {"dtype": torch.float32},
        {"ranks": 4},
        {"hidden_size": 512},
        {"layers": 9},
    ):
        sizes = {"hidden_size": 768, "dtype": torch.bfloat16, "ranks": 2, "layers": 8, **change}
        other = workload(seq_len=2048, vocab_size=6400, batch_size=4, **sizes)  # type: ignore[arg-type]
        assert published_mib(other) == {}


def test_rows_compare_with_the_baseline_and_with_both_published_kinds_of_sequence_parallelism() -> None:
    work = tutorial(published.Place(8, 2048, 6400, 4))
    ddp, sequence = memory_rows(work, {"ddp": 4000 * MIB, "tp_sp": 2000 * MIB})
    assert (ddp["peak_mib"], ddp["saving"], sequence["saving"]) == (4000.0, 0.0, 0.5)
    assert ddp["of_published"] == pytest.approx(4000 / 4148.79)
    assert ddp["published_recompute_mib"] is None
    assert sequence["of_published"] == pytest.approx(2000 / 2665.97)
    assert sequence["of_published_recompute"] == pytest.approx(2000 / 2282.97)


# ---------------------------------------------------------------- modes and batches


def test_a_copy_of_the_model_has_its_share_of_the_batch() -> None:
    per_rank = workload(batch_size=4, ranks=2)
    whole = workload(batch_size=4, ranks=2, policy="fixed_global")
    assert [per_rank.sequences(name) for name in ("ddp", "tp", "all")] == [4, 4, 4]
    assert [whole.sequences(name) for name in ("ddp", "tp", "all")] == [2, 4, 4]
    assert [per_rank.tokens(name) for name in ("ddp", "tp")] == [2 * 4 * 64, 4 * 64]
    assert [whole.tokens(name) for name in ("ddp", "tp")] == [4 * 64, 4 * 64]


def test_modes_use_the_ranks_as_they_say() -> None:
    meshes = {name: mode.mesh(2) for name, mode in MODES.items()}
    assert {name: (mesh.dp, mesh.tp) for name, mesh in meshes.items()} == {
        "ddp": (2, 1),
        "tp": (1, 2),
        "tp_sp": (1, 2),
        "tp_vp": (1, 2),
        "all": (1, 2),
    }
    parallel = {name: (mode.sequence_parallel, mode.vocab_parallel) for name, mode in MODES.items()}
    assert parallel == {
        "ddp": (False, False),
        "tp": (False, False),
        "tp_sp": (True, False),
        "tp_vp": (False, True),
        "all": (True, True),
    }


SMALL = ("--hidden-size", "64", "--seq-len", "32", "--vocab-size", "96", "--dtype", "float32")


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("csv", "json", "png")}
    outputs = ("--csv", files["csv"], "--json", files["json"], "--plot", files["png"])
    status = main(
        ["bench", "memory", *SMALL, "--modes", "tp", "ddp", "--layers", "1", "2", *map(str, outputs)]
    )
    assert status == 0
    document = json.loads(files["json"].read_text())
    rows = document["results"]
    assert [(row["layers"], row["mode"]) for row in rows] == [(1, "ddp"), (1, "tp"), (2, "ddp"), (2, "tp")]
    assert all(row["peak_mib"] > 0 for row in rows)
    assert rows[1]["saving"] == pytest.approx(1 - rows[1]["peak_mib"] / rows[0]["peak_mib"])
    with files["csv"].open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["mode"] for line in lines] == ["ddp", "tp", "ddp", "tp"]
    assert lines[0]["published_mib"] == ""
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "rank 0, which has the largest shards" in out
    assert f"{rows[1]['peak_mib']:.2f}" in out
    assert "published" not in out  # not a published configuration


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "fsdp"], "--modes fsdp: unknown; choose from ddp, tp, tp_sp, tp_vp, all"),
        (
            ["--batch-policy", "half"],
            "--batch-policy half: unknown; choose from fixed_per_rank, fixed_global",
        ),
        (
            ["--batch-policy", "fixed_global", "--batch-size", "3"],
            "--batch-size 3 cannot be divided among the 2 ranks of ddp",
        ),
        (["--dtype", "float64"], "--dtype float64: unknown; choose from float32, bfloat16"),
        (["--ranks", "3"], "num_heads=8 cannot be divided over tp=3"),
        (["--seq-len", "0"], "--seq-len 0: must be at least 1"),
        (["--layers", "0"], "num_layers=0: must be at least 1"),
        (["--threads", "0"], "--threads 0: must be greater than 0"),
        (["--device", "tpu"], "--device tpu: unknown; choose from cpu, cuda"),
        (["--csv", "missing/a.csv"], "--csv missing/a.csv: cannot be written"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "memory", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_batch_that_does_not_divide_is_no_matter_where_nobody_divides_it() -> None:
    work = workload(batch_size=3, ranks=2, policy="fixed_global")
    work.require("tp")
    with pytest.raises(UsageError, match="3 cannot be divided among the 2 ranks"):
        work.require("ddp")


def test_the_table_of_published_figures_has_a_row_for_each_configuration() -> None:
    row = {
        "layers": "8",
        "seq_len": "2048",
        "vocab_size": "6400",
        "batch_size": "4",
        "of_published_recompute": "",
    }
    rows = [
        row | {"mode": "ddp", "peak_mib": "100.4", "of_published": "0.5"},
        row | {"mode": "tp_sp", "peak_mib": "50", "of_published": "0.4", "of_published_recompute": "0.6"},
        row | {"layers": "9", "mode": "ddp", "peak_mib": "50", "of_published": ""},
    ]
    assert list(markdown(rows)) == [
        "| layers | S | V | batch | ddp | tp | tp_sp | tp_vp | all |",
        "|---|---|---|---|---|---|---|---|---|",
        "| 8 | 2048 | 6400 | 4 | 100 (50.0 %) |  | 50 (60.0 %) |  |  |",
    ]
