"""AdamW whose state, gradients and parameters may be sharded over the ranks that hold other tokens (ZeRO).

| stage | parameters | gradients | moments, master | what travels in a step |
|---|---|---|---|---|
| 0 | whole | whole | whole | gradients: each rank's shard, then all |
| 1 | whole | whole | shard | gradients: each rank's shard; parameters: all-gather |
| 2 | whole | shard | shard | the same, gradients during backward |
| 3 | shard | shard | shard | as FSDP2 does it, see `paracore.optim.shard_parameters` |

A step is two passes over memory: one takes the norm of the gradient, one updates, rounds to the model's dtype
and zeroes the gradient.

Sources: Kingma & Ba 2015; Loshchilov & Hutter 2019; Rajbhandari et al. 2020, "ZeRO".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paracore import trace
from paracore.counter_random import key_of
from paracore.errors import UsageError
from paracore.ops.adamw import adamw_
from paracore.optim.flat_parameters import FlatParameters, Item, draw_place
from paracore.optim.fully_sharded import FullySharded
from paracore.optim.hyperparameters import Hyperparameters, require_valid, send
from paracore.optim.options import Options
from paracore.optim.partial_gradients import PartialGradients
from paracore.optim.state import load_states, state_of
from paracore.optim.store import ParameterStore
from paracore.parallel.agreement import disagreement
from paracore.parallel.mesh import ShardingAxes
from paracore.parallel.placement import ParameterPlacement, collect_placements
from paracore.reference_adamw import Draw


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW over a mesh, fused, with clipping.

    params: a module; or parameters, or groups of them, as torch's optimizers take them, with names or
        without. They become views of flat buffers: make the optimizer when the model has its dtype and
        device. Every rank of the mesh must make it, for the same model.
    lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as torch's, per group. lr may be
        a tensor, which is read on the device. decoupled_weight_decay=False is Adam with an L2 penalty.
    module: where params are groups, what they are of: it knows their names and how they lie over tp.
    mesh: a DeviceMesh with the axes dp, cp and tp, as far as there are any, or `ShardingAxes`. Gradients are
        summed over dp and cp, not averaged: divide the loss by the number of tokens of all ranks, as
        `Decoder.loss` does.
    stage: see the table of this file.
    max_norm: clip the norm of the whole gradient to this. skip_nonfinite: leave everything as it is where the
        gradient is not finite on any rank. Without either, a step takes one pass.
    master: "float32", "remainder" (16 bits, the same values) or "none"; for 16-bit parameters.
    moment_dtype: float32 by default. gradient_dtype: in which gradients are summed up over backward passes;
        the parameters' by default. wire_dtype: in which they travel, by default as they are.
    reduction: "ordered" (the default: the same bits in every run, sums in float32 whatever travels) or
        "backend"; see `paracore.parallel.shards.ShardSum`.
    bucket_mib: about how many MiB of parameters are sent at a time; 25 by default.
    overlap: gather updated parameters during the next forward, each module waiting for its own, as its
        state_dict does. Whoever reads them in another way calls `synchronize` first. Needs a module.
    stochastic_rounding, seed: of bfloat16 numbers; random numbers depend on seed, name, step and place alone.
    impl: "triton", "native", "reference" or None; see `paracore.ops.implementations`.

    Forget gradients by this optimizer's `zero_grad`: the model's does not reach those in buckets. With scaled
    losses pass `loss_scale` to `step`; torch's GradScaler judges the gradients of one rank alone. Masters
    follow what is written to parameters, say by `load_state_dict`, but do not see writes through `.data`.

    Raises UsageError for arguments without meaning.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
        module: nn.Module | None = None,
        mesh: DeviceMesh | ShardingAxes | None = None,
        stage: int = 0,
        max_norm: float | None = None,
        skip_nonfinite: bool = True,
        master: str = "float32",
        moment_dtype: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        reduction: str | None = None,
        bucket_mib: float | None = None,
        overlap: bool = True,
        stochastic_rounding: bool = False,
        seed: int = 0,
        impl: str | None = None,
    ) -> None:
        options = Options(
            stage=stage,
            master=master,
            moment_dtype=moment_dtype,
            gradient_dtype=gradient_dtype,
            wire_dtype=wire_dtype,
            reduction=reduction,
            bucket_mib=bucket_mib,
            stochastic=stochastic_rounding,
            impl=impl,
        )
        if max_norm is not None and not max_norm > 0:
            raise UsageError(f"max_norm={max_norm}: must be positive, or None")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        if isinstance(params, nn.Module):
            module, params = params, list(params.named_parameters())
        self._complete = False
        super().__init__(params, defaults)
        self._complete = True
        self.max_norm, self._impl, self._skip_nonfinite = max_norm, impl, skip_nonfinite
        self._axes = mesh if isinstance(mesh, ShardingAxes) else _axes(mesh, stage)
        self._overlap = overlap and module is not None
        self._names = _names(self.param_groups, module)
        with torch.no_grad():
            self._start(module, options, seed)

    def _start(self, module: nn.Module | None, options: Options, seed: int) -> None:
        """Lay the parameters out, and make what steps need."""
        for group in self.param_groups:
            require_valid(group)
        placements = self._placements(module)
        in_groups = [(g, group, p) for g, group in enumerate(self.param_groups) for p in group["params"]]
        named = () if module is None else module.named_parameters()
        use = {name: position for position, (name, _) in enumerate(named)}
        items = [
            Item(parameter, placement, group["amsgrad"], use.get(name, number))
            for number, ((_, group, parameter), placement, name) in enumerate(
                zip(in_groups, placements, self._names, strict=True)
            )
        ]
        self._require_agreement(items, options)
        self._store: ParameterStore
        if options.stage == 3 and self._axes.data.size > 1:
            self._store = FullySharded(_require_module(module), items, self._axes, options)
        else:
            self._store = FlatParameters(items, self._axes, options)
        self._statistics = self._store.statistics()
        self._partial = PartialGradients(self._store.sections, placements, self._axes.tp)
        device = items[0].parameter.device
        self._hyperparameters = Hyperparameters([number for number, _, _ in in_groups], device)
        self._steps = torch.zeros(len(items), dtype=torch.int64, device=device)
        self._draws = self._start_draws(placements, seed) if options.stochastic else None
        self._norm = torch.zeros((), dtype=torch.float64, device=device)
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._summed = False
        if module is not None:
            self._store.wait_in(module)

    def _require_agreement(self, items: list[Item], options: Options) -> None:
        """Raise on every rank what any refuses, or what they mean differently; before anything is moved."""
        error = None
        if options.stochastic and any(item.parameter.dtype == torch.float16 for item in items):
            error = "stochastic_rounding=True for float16 parameters: they are rounded to nearest alone"
        facts = {
            "options": options,
            "parameters": [
                (name, item.parameter.dtype, item.parameter.requires_grad, item.amsgrad)
                for name, item in zip(self._names, items, strict=True)
            ],
        }
        for axis in (self._axes.data, self._axes.tp):
            error = disagreement("AdamW", facts, error, axis, items[0].parameter.device) or error
        if error is not None:
            raise UsageError(error)

    # ---------------------------------------------------------------- one step

    def step(  # type: ignore[override]
        self, closure: Callable[[], Tensor] | None = None, *, loss_scale: float | Tensor = 1.0
    ) -> Tensor | None:
        """Sum up the gradients of all ranks, clip, update, and zero them; return what `closure` returns.

        loss_scale: what the loss was multiplied with; gradients and their norm are divided by it first.
        Every rank of the mesh must call it, after as many backward passes as the others. Parameters without a
        gradient on any rank are left alone, their number of steps included.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step(loss_scale)
        return loss

    @torch.no_grad()
    def _step(self, loss_scale: float | Tensor) -> None:
        store = self._store
        store.wait()
        store.require_in_place()
        store.follow_writes()
        self._sum_gradients()
        judge = self.max_norm is not None or self._skip_nonfinite
        with trace.range("paracore.adamw.norm"):
            squares, present = self._statistics.gather(self._present(), norm=judge)
        scale = self._clip(squares, loss_scale)
        self._update(scale, present * self._finite)
        self._forget(zeroed=store.zeroes_gradients)
        with trace.range("paracore.adamw.write_out"):
            store.publish(overlap=self._overlap)

    @trace.ranged("paracore.adamw.clip")
    def _clip(self, squares: Tensor, loss_scale: float | Tensor) -> Tensor:
        """Return the factor of gradients [1], and keep their norm. squares: the sum of theirs, float64 []."""
        if isinstance(loss_scale, Tensor):
            inverse = loss_scale.detach().double().reciprocal().reshape(())
        else:
            inverse = torch.full_like(squares, 1 / loss_scale)  # filled on the device: nothing is sent there
        self._norm = squares.sqrt() * inverse.abs()
        self._finite = self._norm.isfinite() if self._skip_nonfinite else torch.ones_like(self._finite)
        clip = torch.ones_like(self._norm)
        if self.max_norm is not None:
            clip = (self.max_norm / self._norm).clamp(max=1.0)
        return (clip * inverse).reshape(1)

    @trace.ranged("paracore.adamw.step")
    def _update(self, scale: Tensor, active: Tensor) -> None:
        """Update this rank's parameters. active: which of all take this step, [parameters]."""
        self._steps += active.long()
        coefficients = self._hyperparameters.coefficients(self.param_groups, self._steps, active)
        if self._draws is not None:
            self._draws[:, Draw.STEP] = self._steps
        for section in self._store.sections:
            kept = self._draws, self._store.zeroes_gradients, self._impl
            adamw_(*section.arguments, coefficients, scale, *kept)

    @trace.ranged("paracore.adamw.reduce")
    def _sum_gradients(self) -> None:
        """Sum gradients up over all ranks, unless `whole_gradients` has."""
        if not self._summed:
            self._store.gradients.reduce()
            self._partial.sum_()
            self._summed = True

    def _forget(self, *, zeroed: bool) -> None:
        self._store.gradients.clear(zeroed=zeroed)
        self._summed = False

    def _present(self) -> Tensor:
        """Return which parameters have a gradient on this rank, float64 [parameters]."""
        present = self._store.gradients.present
        return send([float(index in present) for index in range(len(self._names))], self._steps.device)

    @property
    def gradient_norm(self) -> Tensor:
        """The norm of the whole model's gradient in the last step before clipping, float64 [], on the device.

        0 where neither max_norm nor skip_nonfinite asks for it.
        """
        return self._norm

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped for a gradient that was not finite; waits for the device.

        Ask it before a learning-rate scheduler's step.
        """
        return not bool(self._finite)

    # ---------------------------------------------------------------- gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; `step` has done so already. set_to_none is as it must be: see `Gradients`."""
        with torch.no_grad():
            self._forget(zeroed=False)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Keep gradients of backward passes in here on this rank: stage 2 sends none, at stage 1's memory."""
        return self._store.gradients.no_sync()

    @torch.no_grad()
    def whole_gradients(self) -> dict[str, Tensor]:
        """Return the gradients, summed over all ranks and unclipped, by name, of what this rank of tp holds.

        `step` or `zero_grad` must come next, no backward before. Every rank must call it.
        """
        store = self._store
        self._sum_gradients()
        return {
            self._names[index]: x.clone().view(store.parameters[index].shape)
            for index, x in store.whole(lambda section: section.gradient)
        }

    def memory(self) -> dict[str, int]:
        """Return the bytes that this rank holds between steps: see `ParameterStore.memory`."""
        return self._store.memory()

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return what this rank holds for gradients and states: see `ParameterStore.tensors`."""
        return self._store.tensors()

    def synchronize(self) -> None:
        """Wait until all parameters are those of the last step, wherever they are read."""
        self._store.wait()

    # ---------------------------------------------------------------- state

    def state_dict(self, *, keep: bool = True) -> dict[str, Any]:
        """Return the state as torch.optim.AdamW does, but by the parameters' names, whole, on the CPU.

        torch.optim.AdamW loads it, and so does this class over any number of ranks and in any stage. 16-bit
        parameters have "master" besides. Every rank must call it; buckets are gathered one by one. keep:
        whether this rank wants the tensors: of all ranks on a host usually one does.
        """
        return state_of(self._store, self._steps, self._names, self.param_groups, keep=keep)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of this class or of torch.optim.AdamW; each rank keeps what it owns.

        Every rank must call it. Raises UsageError for other parameters or shapes, and where a dtype would
        lose precision. Parameters with a remainder are set too: they are a part of their master.
        """
        self._store.wait()
        load_states(state_dict, self._store, self._steps, self._names, self.param_groups)
        with torch.no_grad():
            self._store.publish(overlap=False)

    def __getstate__(self) -> dict[str, Any]:
        """Optimizers cannot be copied or pickled: their memory is the parameters'."""
        raise UsageError("an optimizer over flat memory cannot be copied or pickled: use state_dict")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, while the optimizer is being made; later there is no room in the flat buffers."""
        if self._complete:
            raise UsageError("parameters cannot be added later: make a new optimizer and load the state")
        super().add_param_group(param_group)

    # ---------------------------------------------------------------- making one

    def _placements(self, module: nn.Module | None) -> list[ParameterPlacement]:
        if module is not None:
            found = collect_placements(module, self._axes.tp.size)
            return [found[name] for name in self._names]
        if self._axes.tp.size > 1:
            raise UsageError("over tp pass the module: its placements say what is cut and what is not")
        return [
            ParameterPlacement.replicate(p.shape, 1) for group in self.param_groups for p in group["params"]
        ]

    def _start_draws(self, placements: list[ParameterPlacement], seed: int) -> Tensor:
        table = torch.zeros(len(self._names), len(Draw), dtype=torch.int64)
        for index, (name, placement) in enumerate(zip(self._names, placements, strict=True)):
            table[index, Draw.KEY0], table[index, Draw.KEY1] = key_of(seed, name)
            inner, whole_inner, first = draw_place(placement, self._axes.tp.rank)
            table[index, Draw.INNER], table[index, Draw.WHOLE_INNER] = inner, whole_inner
            table[index, Draw.FIRST] = first
        for section in self._store.sections:
            for part in section.parts:
                table[part.index, Draw.ORIGIN] = part.first - part.begin
        return table.to(self._steps.device)


def _require_module(module: nn.Module | None) -> nn.Module:
    if module is None:
        raise UsageError("stage=3: pass the module that shard_parameters has sharded, not its parameters")
    return module


def _axes(mesh: DeviceMesh | None, stage: int) -> ShardingAxes:
    if mesh is not None:
        return ShardingAxes.of(mesh)
    if stage and dist.is_initialized() and dist.get_world_size() > 1:
        raise UsageError(f"stage={stage} without mesh: over which of the {dist.get_world_size()} ranks?")
    return ShardingAxes.alone()


def _names(groups: list[dict[str, Any]], module: nn.Module | None) -> list[str]:
    """Return the parameters' names in the module; without one those given, or their numbers."""
    parameters = [p for group in groups for p in group["params"]]
    if module is not None:
        names = {id(p): name for name, p in module.named_parameters()}
        foreign = [number for number, p in enumerate(parameters) if id(p) not in names]
        if foreign:
            raise UsageError(f"params: number {foreign[0]} is not a parameter of the module")
        return [names[id(p)] for p in parameters]
    if "param_names" in groups[0]:
        return [name for group in groups for name in group["param_names"]]
    return [str(number) for number in range(len(parameters))]
