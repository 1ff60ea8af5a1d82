"""The rules by which a parallel run counts as equal to the dense one, and the report of the verdict.

Forward and first backward: the error of the parallel run against the dense run in float64 must be
at most twice the dense run's own error in the same dtype, plus a floor (`floor_of`). Errors are
relative: ||x - reference|| / ||reference||. The worst rank counts.

Many steps of AdamW are chaotic: whatever differs by rounding drifts apart. There the parallel run
may deviate from the dense one at most twice as far, plus the same floor, as the worst of four dense
runs whose initial weights were moved by one unit in the last place.

Ranks that hold the same thing must hold the same bits: outputs, gradients and final parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paracore.difference import Difference, difference, worst_difference
from paracore.parallel.ledger import Traffic
from paracore.parallel.placement import ParameterPlacement

ALLOWED_RATIO = 2.0


def floor_of(dtype: torch.dtype) -> float:
    """Return the relative error that is always allowed, in terms of eps = `torch.finfo(dtype).eps`.

    4 eps in float32: small tensors, and the loss, may by luck be exact in the dense run. 1 eps in
    16-bit dtypes, where errors are large and luck is small beside them. 256 eps in float64, where the
    dense run is itself the reference and its own error counts as zero.
    """
    multiple = {torch.float64: 256, torch.float32: 4}.get(dtype, 1)
    return multiple * torch.finfo(dtype).eps


class Report:
    """Judges differences by the rules above and becomes the report of `paracore validate`."""

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, placements: Mapping[str, ParameterPlacement]
    ) -> None:
        self.placements, self.floor = placements, floor_of(dtype)
        self.failures: list[str] = []
        self.config, self.comm = config, list[dict[str, Any]]()
        self.forward: dict[str, float] = {}
        self.backward: dict[str, Any] = {}
        self.optimizer: dict[str, Any] = {"trace": [], "max_param_diff": None}
        self.float64: dict[str, Any] = {"allowed_ratio": ALLOWED_RATIO, "floor": self.floor, "trace": []}

    def enter_traffic(self, phases: Mapping[str, Iterable[Traffic]]) -> None:
        """Add what the phases of one step communicated."""
        for phase, traffic in phases.items():
            self.comm += [{"phase": phase, **dataclasses.asdict(row)} for row in traffic]

    def judge_forward(
        self, outputs: Mapping[str, list[Tensor]], dense: Mapping[str, Tensor], exact: Mapping[str, Tensor]
    ) -> None:
        """Compare the logits and the loss of every rank with the dense run's."""
        self.forward = {
            "max_logit_diff": worst_difference(outputs["logits"], dense["logits"]).max,
            "loss_diff": worst_difference(outputs["loss"], dense["loss"]).max,
        }
        for name, copies in outputs.items():
            self.float64[name] = self._judge_error(name, copies, dense[name], exact[name])

    def judge_backward(
        self,
        gradients: Mapping[str, list[Tensor]],
        dense: Mapping[str, Tensor],
        exact: Mapping[str, Tensor],
    ) -> None:
        """Compare every parameter's gradient, in all copies that ranks hold, with the dense run's."""
        rows = [
            {"name": name, "placement": str(self.placements[name])}
            | worst_difference(copies, dense[name])._asdict()
            for name, copies in gradients.items()
        ]
        self.backward = {"max_grad_diff": max(row["max"] for row in rows), "parameters": rows}
        self.float64["parameters"] = [
            {"name": name, **self._judge_error(f"gradient of {name}", copies, dense[name], exact[name])}
            for name, copies in gradients.items()
        ]

    def judge_point(
        self, step: int, logits: Tensor, dense: Tensor, exact: Tensor, perturbed: Sequence[Tensor]
    ) -> None:
        """Compare the logits after some steps with those of the dense runs."""
        off = difference(logits, dense)
        limit = self._drift_limit([difference(run, dense) for run in perturbed])
        self._require(off.rel_l2, limit, f"logits after step {step}")
        self.optimizer["trace"].append({"step": step, **off._asdict(), "limit": limit})
        errors = {"dense": dense, "parallel": logits}
        self.float64["trace"].append(
            {"step": step, **{name: difference(run, exact).rel_l2 for name, run in errors.items()}}
        )

    def judge_parameters(
        self,
        parameters: Mapping[str, list[Tensor]],
        dense: Mapping[str, Tensor],
        perturbed: Sequence[Mapping[str, Tensor]],
    ) -> None:
        """Compare final parameters, all of them together: single ones drift by chance."""
        for name, copies in parameters.items():
            self._require_same_bits(copies, f"final {name}")
        expected = _joined(dense, parameters)
        drifts = [difference(_joined(run, parameters), expected) for run in perturbed]
        off = difference(
            _joined({name: copies[0] for name, copies in parameters.items()}, parameters), expected
        )
        limit = self._drift_limit(drifts)
        self._require(off.rel_l2, limit, "final parameters")
        self.optimizer |= {
            "max_param_diff": off.max,
            "param_rel_l2": off.rel_l2,
            "param_rel_l2_limit": limit,
            "perturbed_max_param_diff": max(drift.max for drift in drifts),
        }

    def finish(self) -> dict[str, Any]:
        """Return the report."""
        return {
            "config": self.config,
            "forward": self.forward,
            "backward": self.backward,
            "optimizer": self.optimizer,
            "float64": self.float64,
            "comm": self.comm,
            "failures": self.failures,
            "passed": not self.failures,
        }

    def _judge_error(self, name: str, copies: list[Tensor], dense: Tensor, exact: Tensor) -> dict[str, float]:
        self._require_same_bits(copies, name)
        dense_error = difference(dense, exact).rel_l2
        parallel_error = worst_difference(copies, exact).rel_l2
        limit = ALLOWED_RATIO * dense_error + self.floor
        self._require(parallel_error, limit, name)
        return {"dense": dense_error, "parallel": parallel_error, "limit": limit}

    def _drift_limit(self, drifts: Sequence[Difference]) -> float:
        return ALLOWED_RATIO * max(drift.rel_l2 for drift in drifts) + self.floor

    def _require(self, error: float, limit: float, what: str) -> None:
        if not error <= limit:  # also where the error is NaN
            self.failures.append(f"{what}: relative error {error:.3e}, allowed {limit:.3e}")

    def _require_same_bits(self, copies: Sequence[Tensor], what: str) -> None:
        if not all(torch.equal(copies[0], other) for other in copies[1:]):
            self.failures.append(f"{what}: differs between ranks that must hold the same")


def _joined(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in names])
