"""The proof that a model cut over the mesh equals the dense one, with tolerances that are rules.

Forward and first backward: the error of the parallel run against the dense run in float64 must be
at most twice the dense run's own error in the same dtype, plus a floor of a few units of rounding
(`floor_of`). Errors are relative: ||x - reference|| / ||reference||.

Many steps of AdamW are chaotic: whatever differs by rounding drifts apart. There the parallel run
may deviate from the dense one at most twice as far, plus the same floor, as the worst of four dense
runs whose initial weights were moved by one unit in the last place.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paracore.checkpoint import gather_copies, shard_state_dict
from paracore.errors import UsageError
from paracore.nn.config import DecoderConfig
from paracore.nn.decoder import Decoder
from paracore.nn.initialization import perturb_constants_
from paracore.parallel.counter_random import integers_at
from paracore.parallel.ledger import Traffic
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.placement import ParameterPlacement
from paracore.threads import all_cores
from paracore.training import Trainer

PERTURBED_RUNS = 4
ALLOWED_RATIO = 2.0


def floor_of(dtype: torch.dtype) -> float:
    """Return the relative error that is always allowed.

    Four units of rounding; in float64, where the dense run is itself the reference and its error
    counts as zero, 256.
    """
    return (256 if dtype == torch.float64 else 4) * torch.finfo(dtype).eps


@dataclasses.dataclass(frozen=True)
class ValidationSettings:
    """What is validated: a model, a batch of random tokens, and a run of AdamW over it."""

    model: DecoderConfig
    seq_len: int = 256
    batch_size: int = 2
    dtype: torch.dtype = torch.float32
    steps: int = 20
    log_every: int = 10
    lr: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "log_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.steps < 0:
            raise UsageError(f"steps={self.steps}: must not be negative")


class Difference(NamedTuple):
    """How far a tensor is from a reference; relative to the reference's norm in `rel_l2`."""

    mean: float
    max: float
    rel_l2: float


class Batch(NamedTuple):
    """Tokens and next-token labels, both [B, S] int64."""

    tokens: Tensor
    labels: Tensor


class Point(NamedTuple):
    """Where a training run stands after some steps."""

    step: int
    logits: Tensor  # [B, S, V]
    trainer: Trainer


Tensors = Mapping[str, Tensor]


def validate(settings: ValidationSettings, tp: MeshAxis, device: torch.device) -> dict[str, Any] | None:
    """Compare the model cut over `tp` with the dense one; return the report on the first rank.

    Every rank must call it; the others get None. The report has the keys `config`, `forward`,
    `backward`, `optimizer`, `float64`, `comm`, `failures` and `passed`; README.md describes them.
    """
    is_first = tp.rank == 0
    dense = Decoder(
        settings.model, MeshAxis.alone("tp"), seed=settings.seed, device=device, dtype=settings.dtype
    )
    perturb_constants_(dense, settings.seed)
    parallel = Decoder(settings.model, tp, seed=settings.seed, device=device, dtype=settings.dtype)
    placements = parallel.parameter_placements()
    parallel.load_state_dict(shard_state_dict(dense.state_dict(), placements, tp.rank))
    exact = copy.deepcopy(dense).double() if is_first else None
    batch = _random_batch(settings, device)

    report = Report(settings, tp)
    trainer = Trainer(parallel, lr=settings.lr)
    first = _first_backward(trainer, batch, report)
    gradients = gather_copies(_gradients(parallel), placements, tp)
    if exact is not None:
        with all_cores():
            trainers = Trainer(dense, lr=settings.lr), Trainer(exact, lr=settings.lr)
            report.judge_forward_backward(first, gradients, *trainers, batch, placements)

    companions = _dense_runs(dense, exact, batch, settings) if exact is not None else None
    beside = None
    for point in _training_run(trainer, batch, settings):
        if companions is not None:
            with all_cores():
                beside = next(companions)
            report.judge_point(point, beside)
    parameters = gather_copies(dict(parallel.named_parameters(remove_duplicate=False)), placements, tp)
    if beside is not None:
        report.judge_parameters(beside, parameters)
    return report.finish() if is_first else None


# ---------------------------------------------------------------- the runs


def _random_batch(settings: ValidationSettings, device: torch.device) -> Batch:
    B, S = settings.batch_size, settings.seq_len
    index = torch.arange(B * (S + 1), device=device)
    text = integers_at(index, settings.seed, "tokens", settings.model.vocab_size).view(B, S + 1)
    return Batch(text[:, :-1], text[:, 1:])


class FirstPass(NamedTuple):
    """Logits [B, S, V] and loss of the first forward."""

    logits: Tensor
    loss: Tensor


def _first_backward(trainer: Trainer, batch: Batch, report: Report | None = None) -> FirstPass:
    """Forward for the logits, then forward and backward for the loss and the gradients."""
    with torch.no_grad():
        logits = trainer.model(batch.tokens)
    trainer.model.tp.ledger.take()
    loss = trainer.model.loss(*batch)
    if report is not None:
        report.enter_traffic("forward", trainer.model.tp.ledger.take())
    loss.backward()
    if report is not None:
        report.enter_traffic("backward", trainer.model.tp.ledger.take())
    trainer.sync_gradients()
    if report is not None:
        report.enter_traffic("gradient_sync", trainer.model.tp.ledger.take())
    return FirstPass(logits, loss.detach())


def _training_run(trainer: Trainer, batch: Batch, settings: ValidationSettings) -> Iterator[Point]:
    """Take AdamW steps on one batch; yield every `log_every` steps and at the end."""
    trainer.optimizer.zero_grad()
    for step in range(1, settings.steps + 1):
        trainer.step(*batch)
        if step % settings.log_every == 0 or step == settings.steps:
            with torch.no_grad():
                logits = trainer.model(batch.tokens)
            yield Point(step, logits, trainer)  # outside: no_grad would leak to whoever resumes this


class DensePoints(NamedTuple):
    """The dense runs at one step: in the dtype, in float64, and from perturbed weights."""

    dense: Point
    exact: Point
    perturbed: list[Point]


def _dense_runs(
    dense: Decoder, exact: Decoder, batch: Batch, settings: ValidationSettings
) -> Iterator[DensePoints]:
    models = [dense, exact, *(_perturbed(dense, settings.seed, run) for run in range(PERTURBED_RUNS))]
    runs = [_training_run(Trainer(model, lr=settings.lr), batch, settings) for model in models]
    for dense_point, exact_point, *perturbed in zip(*runs, strict=True):
        yield DensePoints(dense_point, exact_point, perturbed)


def _perturbed(model: Decoder, seed: int, run: int) -> Decoder:
    """Return a copy with every weight moved by one unit in the last place, up or down at random."""
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            index = torch.arange(parameter.numel(), device=parameter.device).view_as(parameter)
            up = integers_at(index, seed, f"perturbation {run} of {name}", 2) == 1
            towards = torch.where(up, torch.inf, -torch.inf).to(parameter)
            parameter.copy_(torch.nextafter(parameter, towards))
    return moved


def _gradients(model: Decoder) -> dict[str, Tensor]:
    """Return every parameter's gradient; one that got none counts as zero."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters}


# ---------------------------------------------------------------- the verdict


def difference(x: Tensor, reference: Tensor) -> Difference:
    """Return how far `x` is from `reference`, computed in float64."""
    reference = reference.double()
    delta = x.double() - reference
    norm, off = torch.linalg.vector_norm(reference), torch.linalg.vector_norm(delta)
    relative = 0.0 if off == 0 else (off / norm).item()  # inf where the reference is all zero
    return Difference(delta.abs().mean().item(), delta.abs().max().item(), relative)


def worst_difference(copies: Sequence[Tensor], reference: Tensor) -> Difference:
    """Return the largest difference of any rank's copy, so that no replica goes astray unseen."""
    return Difference(*map(_largest, zip(*(difference(copy, reference) for copy in copies), strict=True)))


def _largest(values: Sequence[float]) -> float:
    # max() passes over NaN unless it comes first.
    return math.nan if any(map(math.isnan, values)) else max(values)


class Report:
    """Collects differences, judges them by the rules above, and becomes the JSON report."""

    def __init__(self, settings: ValidationSettings, tp: MeshAxis) -> None:
        self.settings = settings
        self.floor = floor_of(settings.dtype)
        self.failures: list[str] = []
        self.data: dict[str, Any] = {
            "config": _plain(settings) | {"tp": tp.size},
            "forward": {},
            "backward": {},
            "optimizer": {"trace": [], "max_param_diff": 0.0},
            "float64": {"allowed_ratio": ALLOWED_RATIO, "floor": self.floor, "trace": []},
            "comm": [],
        }

    def enter_traffic(self, phase: str, traffic: Sequence[Traffic]) -> None:
        """Add what one phase of a step communicated."""
        self.data["comm"] += [{"phase": phase, **dataclasses.asdict(row)} for row in traffic]

    def judge_forward_backward(
        self,
        first: FirstPass,
        gradients: Mapping[str, list[Tensor]],
        dense: Trainer,
        exact: Trainer,
        batch: Batch,
        placements: Mapping[str, ParameterPlacement],
    ) -> None:
        """Compare the first forward and backward with the dense model's, in its dtype and in float64."""
        dense_first, exact_first = _first_backward(dense, batch), _first_backward(exact, batch)
        self.data["forward"] = {
            "max_logit_diff": difference(first.logits, dense_first.logits).max,
            "loss_diff": difference(first.loss, dense_first.loss).max,
        }
        for name in ("logits", "loss"):
            tensors = (getattr(run, name) for run in (first, dense_first, exact_first))
            self.data["float64"][name] = self._judge_error(name, *tensors)
        dense_gradients, exact_gradients = _gradients(dense.model), _gradients(exact.model)
        rows, exact_rows = [], []
        for name, copies in gradients.items():
            off = worst_difference(copies, dense_gradients[name])
            rows.append({"name": name, "placement": str(placements[name]), **off._asdict()})
            errors = self._judge_error(
                f"gradient of {name}", copies, dense_gradients[name], exact_gradients[name]
            )
            exact_rows.append({"name": name, **errors})
        self.data["backward"] = {"max_grad_diff": max(row["max"] for row in rows), "parameters": rows}
        self.data["float64"]["parameters"] = exact_rows

    def judge_point(self, point: Point, dense: DensePoints) -> None:
        """Compare the logits after some steps with those of the dense runs."""
        off = difference(point.logits, dense.dense.logits)
        drifts = [difference(run.logits, dense.dense.logits).rel_l2 for run in dense.perturbed]
        limit = ALLOWED_RATIO * max(drifts) + self.floor
        optimizer, trace64 = self.data["optimizer"], self.data["float64"]["trace"]
        optimizer["trace"].append({"step": point.step, **off._asdict(), "limit": limit})
        self._require(off.rel_l2 <= limit, f"logits after step {point.step}", off.rel_l2, limit)
        trace64.append(
            {
                "step": point.step,
                "dense": difference(dense.dense.logits, dense.exact.logits).rel_l2,
                "parallel": difference(point.logits, dense.exact.logits).rel_l2,
                "perturbed": [difference(run.logits, dense.exact.logits).rel_l2 for run in dense.perturbed],
            }
        )

    def judge_parameters(self, dense: DensePoints, parameters: Mapping[str, list[Tensor]]) -> None:
        """Compare final parameters, all of them together: single ones drift too differently."""
        names = parameters.keys()
        expected = _joined(dense.dense.trainer.model.state_dict(), names)
        drifts = [
            difference(_joined(run.trainer.model.state_dict(), names), expected) for run in dense.perturbed
        ]
        # A parameter has fewer copies than there are ranks where it is cut: repeat its last one.
        most = max(map(len, parameters.values()))
        joined = [
            _joined({name: copies[min(i, len(copies) - 1)] for name, copies in parameters.items()}, names)
            for i in range(most)
        ]
        off = worst_difference(joined, expected)
        limit = ALLOWED_RATIO * max(drift.rel_l2 for drift in drifts) + self.floor
        self.data["optimizer"] |= {
            "max_param_diff": off.max,
            "param_rel_l2": off.rel_l2,
            "param_rel_l2_limit": limit,
            "perturbed_max_param_diff": max(drift.max for drift in drifts),
        }
        self._require(off.rel_l2 <= limit, "final parameters", off.rel_l2, limit)

    def _judge_error(
        self, name: str, parallel: Tensor | list[Tensor], dense: Tensor, exact: Tensor
    ) -> dict[str, float]:
        copies = [parallel] if isinstance(parallel, Tensor) else parallel
        dense_error = difference(dense, exact).rel_l2
        parallel_error = worst_difference(copies, exact).rel_l2
        limit = ALLOWED_RATIO * dense_error + self.floor
        self._require(parallel_error <= limit, name, parallel_error, limit)
        return {"dense": dense_error, "parallel": parallel_error, "limit": limit}

    def _require(self, holds: bool, what: str, error: float, limit: float) -> None:
        if not holds:  # also where the error is NaN
            self.failures.append(f"{what}: relative error {error:.3e}, allowed {limit:.3e}")

    def finish(self) -> dict[str, Any]:
        """Return the report."""
        return self.data | {"failures": self.failures, "passed": not self.failures}


def _joined(tensors: Tensors, names: Sequence[str] | Any) -> Tensor:
    return torch.cat([tensors[name].detach().flatten() for name in names])


def _plain(settings: ValidationSettings) -> dict[str, Any]:
    """Return the settings as JSON knows them."""
    return dataclasses.asdict(settings) | {"dtype": str(settings.dtype).removeprefix("torch.")}
