"""The rules by which a parallel run counts as equal to the dense one, and the report of the verdict.

How far rounding alone may lead is measured, not guessed: by dense runs in the same dtype, one as it is
and four whose initial weights were moved by one unit in the last place. A number that cancels, like
the gradient of a q/k norm, moves far with them; one that does not, hardly.

Forward and first backward: the parallel run may be at most twice as far from the dense run in float64
as the worst of those five. Many steps of AdamW are chaotic, whatever differs by rounding drifts
apart: there the parallel run may deviate from the dense one at most twice as far as the worst of the
four. Distances are relative, ||x - reference|| / ||reference||, and one eps of the dtype is always
allowed. The worst rank counts.

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

Tensors = Mapping[str, Tensor]
Copies = Mapping[str, list[Tensor]]  # of every rank that holds the tensor, or of every set of its shards


class Report:
    """Judges differences by the rules above and becomes the report of `paracore validate`."""

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, placements: Mapping[str, ParameterPlacement]
    ) -> None:
        self.placements, self.floor = placements, torch.finfo(dtype).eps
        self.failures: list[str] = []
        self.config, self.comm, self.memory = config, list[dict[str, Any]](), list[dict[str, Any]]()
        self.forward: dict[str, float] = {}
        self.backward: dict[str, Any] = {}
        self.optimizer: dict[str, Any] = {"trace": [], "max_param_diff": None}
        self.float64: dict[str, Any] = {"allowed_ratio": ALLOWED_RATIO, "floor": self.floor, "trace": []}

    def enter_traffic(self, phases: Mapping[str, Iterable[Traffic]]) -> None:
        """Add what the phases of one step communicated."""
        for phase, traffic in phases.items():
            self.comm += [{"phase": phase, **dataclasses.asdict(row)} for row in traffic]

    def enter_memory(self, held: Mapping[str, int] | None, formula: Mapping[str, int]) -> None:
        """Add the bytes that a rank holds of parameters, gradients and states, beside the formula's."""
        if held is not None:
            self.memory = [
                {"kind": kind, "bytes": number, "formula": formula.get(kind)} for kind, number in held.items()
            ]

    def judge_forward(
        self, outputs: Copies, exact: Tensors, dense: Tensors, perturbed: Sequence[Tensors]
    ) -> None:
        """Compare the logits and the loss of every rank with the dense runs'."""
        self.forward = {
            "max_logit_diff": worst_difference(outputs["logits"], dense["logits"]).max,
            "loss_diff": worst_difference(outputs["loss"], dense["loss"]).max,
        }
        for name in outputs:
            self.float64[name] = self._judge_error(name, name, outputs, exact, dense, perturbed)

    def judge_backward(
        self, gradients: Copies, exact: Tensors, dense: Tensors, perturbed: Sequence[Tensors]
    ) -> None:
        """Compare every parameter's gradient, in all copies that ranks hold, with the dense runs'."""
        rows = [
            {"name": name, "placement": str(self.placements[name])}
            | worst_difference(copies, dense[name])._asdict()
            for name, copies in gradients.items()
        ]
        self.backward = {"max_grad_diff": max(row["max"] for row in rows), "parameters": rows}
        self.float64["parameters"] = [
            {"name": name}
            | self._judge_error(f"gradient of {name}", name, gradients, exact, dense, perturbed)
            for name in gradients
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

    def judge_parameters(self, parameters: Copies, dense: Tensors, perturbed: Sequence[Tensors]) -> None:
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
            "memory": self.memory,
            "failures": self.failures,
            "passed": not self.failures,
        }

    def _judge_error(
        self,
        what: str,
        name: str,
        parallel: Copies,
        exact: Tensors,
        dense: Tensors,
        perturbed: Sequence[Tensors],
    ) -> dict[str, float]:
        self._require_same_bits(parallel[name], what)
        errors = [difference(run[name], exact[name]).rel_l2 for run in (dense, *perturbed)]
        error = worst_difference(parallel[name], exact[name]).rel_l2
        limit = ALLOWED_RATIO * max(errors) + self.floor
        self._require(error, limit, what)
        return {"dense": errors[0], "parallel": error, "limit": limit}

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
