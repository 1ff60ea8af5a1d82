"""Give the modules of an existing model their places on a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from paracore.checkpoint import gather_copies
from paracore.dropin.plan import Plan, apply_styles, check, resolve
from paracore.dropin.report import Changes, Replaced, Report
from paracore.dropin.styles import Style
from paracore.dropin.weights import Source, load_shards, open_weights, require_fitting
from paracore.errors import UsageError
from paracore.hf import families
from paracore.nn.linear import require_cut
from paracore.nn.sequence import require_strategy
from paracore.optim import AdamW, shard_parameters
from paracore.parallel.agreement import disagreement
from paracore.parallel.gradient_sync import GradientSync
from paracore.parallel.layout import parse_layout
from paracore.parallel.ledger import Ledger
from paracore.parallel.mesh import MeshAxis, TrainingAxes
from paracore.parallel.overlap import Overlap
from paracore.parallel.placement import ParameterPlacement, collect_placements

_AXES = ("dp", "cp", "tp")


@dataclasses.dataclass
class Parallel(Report):
    """What `parallelize` did, and what training on the mesh needs.

    axes: of the mesh, as this rank sees them. zero: the stage that was asked for. placements: how each
    parameter lies over tp, by name, tied parameters under each of theirs.
    """

    model: nn.Module
    axes: TrainingAxes
    zero: int

    def __post_init__(self) -> None:
        self.placements: dict[str, ParameterPlacement] = collect_placements(self.model, self.axes.tp.size)
        self._optimizer: AdamW | None = None
        self._undone = False
        self._sync = None if self._sharded else GradientSync(self.model, self.axes.tp, self.axes.data)

    @property
    def _sharded(self) -> bool:
        """Whether FSDP2 has the parameters."""
        return self.zero == 3 and self.axes.data.size > 1

    def sync_gradients(self) -> None:
        """Sum the parts that ranks hold of gradients, for an optimizer of torch's: once before each step.

        Summed over dp and cp, and over tp where the placement says so. Every rank must call it. Raises
        UsageError where somebody else does so: FSDP2 with zero=3, or the optimizer that `optimizer` gave.
        """
        self._require_parallel("sync_gradients()")
        if self._optimizer is not None:
            raise UsageError("sync_gradients(): the AdamW of optimizer() sums gradients in its step")
        if self._sync is None:
            raise UsageError("sync_gradients() with zero=3: FSDP2 sums them in backward; use optimizer()")
        self._sync()

    def optimizer(self, params: Any = None, **options: Any) -> AdamW:
        """Return the AdamW of this model and mesh, of the stage `zero`; every rank must call it, once.

        params: groups of parameters, as torch's optimizers take them; all in one by default. options: those
        of `paracore.optim.AdamW`. It sums gradients itself. Raises UsageError where one has been made.
        """
        self._require_parallel("optimizer()")
        if self._optimizer is not None:
            raise UsageError("optimizer(): one was made already, and has the parameters in its flat memory")
        if params is None:
            made = AdamW(self.model, mesh=self.axes, stage=self.zero, **options)
        else:
            made = AdamW(params, module=self.model, mesh=self.axes, stage=self.zero, **options)
        self._optimizer = made
        return made

    @torch.no_grad()
    def full_state_dict(self, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Return the state dict of the dense model, for `save_pretrained(..., state_dict=...)`.

        Every rank must call it, and gets all of it, on `device` (where the model is by default), one
        parameter after the other. Tied names have the same tensor. Raises UsageError, on every rank, where
        ranks of tp that must hold the same values do not.
        """
        self._require_parallel("full_state_dict()")
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        whole: dict[Tensor, Tensor] = {}
        found: dict[str, Tensor] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                found[name] = value
                continue
            if value not in whole:
                placement = self.placements[name] if parameters.get(name) is value else None
                dense = (
                    value.detach().clone() if placement is None else self._gathered(name, value, placement)
                )
                whole[value] = dense if device is None else dense.to(device)
            found[name] = whole[value]
        return found

    def _gathered(self, name: str, held: Tensor, placement: ParameterPlacement) -> Tensor:
        local = held.full_tensor() if isinstance(held, DTensor) else held.detach()
        first, *others = gather_copies({name: local}, {name: placement}, self.axes.tp)[name]
        if not all(torch.equal(first, other) for other in others):
            raise UsageError(f"{name}: the {placement.replicas} ranks that share it hold different values")
        return first.clone()

    def undo(self) -> None:
        """Make the model what it was, with the weights that it has now; every rank must call it.

        Each rank gathers the whole weights. Gradients are dropped, and an optimizer of the parallel model has
        no use any more. Raises UsageError with zero=3, and where somebody has changed the same modules since.
        """
        if self._sharded:
            raise UsageError(
                "undo() with zero=3: FSDP2 does not give parameters back; load full_state_dict() into "
                "another model"
            )
        if self._optimizer is not None and not self._undone:
            self._optimizer.synchronize()  # its parameters may still be under way
        super().undo()
        self._undone = True

    def _require_parallel(self, call: str) -> None:
        if self._undone:
            raise UsageError(f"{call} after undo(): the model is no longer parallel")


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | TrainingAxes,
    plan: Plan | None = None,
    *,
    sequence_parallel: bool = False,
    vocab_parallel: bool = False,
    overlap: Overlap | None = None,
    zero: int = 0,
    layout: str = "zigzag",
    strategy: str = "ring",
    weights: Source | None = None,
) -> Parallel:
    """Make a model parallel in place, and return what was done and what training needs.

    model: on every rank the same, weights too; or on the meta device. Its Parameters that are cut are
        emptied, so make optimizers afterwards.
    mesh: with any of the axes dp, cp and tp, or `TrainingAxes`. Every rank of it must call this.
    plan: which modules lie over tp, and how: see `paracore.dropin.plan`. Without one the model must be of
        transformers' Llama, Qwen2, Qwen3 or Mistral, and gets our kernels too, as by `paracore.fuse`.
    sequence_parallel, vocab_parallel, overlap, layout, strategy: of the families alone. A plan's styles have
        the first three; cp cannot be had with a plan, as a module's own forward tells no layer which tokens
        of the whole sequence it holds.
    zero: the stage of `Parallel.optimizer`; 3 shards the parameters by FSDP2.
    weights: the dense weights, to be read onto this rank: see `paracore.dropin.weights.open_weights`.

    Each rank of cp and tp is given the same batch, of whole sequences; each of dp one of its own. The loss of
    a model of the families is the mean over the labels of all ranks, and what it returns else is the same on
    every rank of cp and tp:

        mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        parallel = parallelize(model, mesh, sequence_parallel=True, vocab_parallel=True, zero=2)
        optimizer = parallel.optimizer(lr=3e-4)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    With a plan a rank's attention has the heads that its column-parallel layers give: view(B, S, -1, D).
    Gradients are summed over dp, not averaged, so divide the loss by the number of tokens of all ranks:

        mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))
        parallel = parallelize(model, mesh, {"layers.*.up": "column", "layers.*.down": "row"})
        optimizer = parallel.optimizer(lr=3e-4)
        count = (labels != -100).sum()
        dist.all_reduce(count, group=mesh.get_group("dp"))
        logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / count
        loss.backward()
        optimizer.step()

    Raises UsageError, before anything is changed and before any communication, for arguments, plans, modules
    and weights that do not fit; then, on every rank, where ranks disagree on any of these.
    """
    if zero not in (0, 1, 2, 3):
        raise UsageError(f"zero={zero!r}: must be 0, 1, 2 or 3")
    sizes = _sizes(mesh)
    device = _device(model, mesh)
    cuts: dict[str, Any] = {
        "sequence_parallel": sequence_parallel,
        "vocab_parallel": vocab_parallel,
        "overlap": overlap,
    }
    if plan is None:
        require_cut(overlap, sequence_parallel)
        parse_layout(layout)
        require_strategy(strategy)
        styles = resolve(model, families.plan(model, sizes["tp"], **cuts))
    else:
        _require_plain_plan({**cuts, "layout": layout, "strategy": strategy}, sizes["cp"])
        styles = resolve(model, plan)
    opened = None if weights is None else open_weights(weights)
    placements = check(model, styles, _preview(mesh))
    if opened is not None:
        require_fitting(model, placements, opened, families.recompute_buffer)

    axes = mesh if isinstance(mesh, TrainingAxes) else TrainingAxes.of(mesh)
    how = {**cuts, "zero": zero, "layout": layout, "strategy": strategy, "styles": styles}
    _require_agreement(model, how, axes, device, compare_values=weights is None)
    changes = Changes()
    replaced: list[Replaced] = apply_styles(model, _on(styles, device, axes.tp), axes.tp, changes)
    if opened is not None:
        load_shards(model, placements, opened, axes.tp, device, families.recompute_buffer)
    report = Report(replaced, [], changes)
    if axes.tp.size > 1:
        from paracore.dropin.untraced import Untraced  # imports torch's compiler

        for layer in dict.fromkeys(model.get_submodule(entry.name) for entry in replaced):
            changes.adopt(layer, Untraced)
    if plan is None:
        from paracore.hf.adopt import adopt_decoders  # imports transformers, which is there by now

        adopt_decoders(
            report, model, axes, sequence_parallel=sequence_parallel, layout=layout, strategy=strategy
        )
    if zero == 3:
        shard_parameters(model, axes.data)
    return Parallel(report.replaced, report.left, changes, model, axes, zero)


def _sizes(mesh: DeviceMesh | TrainingAxes) -> dict[str, int]:
    """Return the sizes of dp, cp and tp; raise UsageError for other axes that have ranks to share."""
    if isinstance(mesh, TrainingAxes):
        return {"dp": mesh.dp.size, "cp": mesh.cp.size, "tp": mesh.tp.size}
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"mesh is a {type(mesh).__name__}, must be a DeviceMesh or TrainingAxes")
    names = mesh.mesh_dim_names or ()
    sizes = {name: mesh.size(dim) for dim, name in enumerate(names)}
    others = [f"{name}={size}" for name, size in sizes.items() if name not in _AXES and size > 1]
    if others:
        raise UsageError(f"mesh has {', '.join(others)}: parallelize serves the axes dp, cp and tp alone")
    if not set(names) & set(_AXES):
        raise UsageError(f"mesh has the axes {names}, must have one of dp, cp and tp")
    return {name: sizes.get(name, 1) for name in _AXES}


def _preview(mesh: DeviceMesh | TrainingAxes) -> MeshAxis:
    """Return the axis tp of a mesh without its process group: making one may communicate."""
    if isinstance(mesh, TrainingAxes):
        return mesh.tp
    names = mesh.mesh_dim_names or ()
    if "tp" not in names:
        return MeshAxis.alone("tp")
    return MeshAxis("tp", mesh.size(names.index("tp")), mesh.get_local_rank("tp"), None, Ledger())


def _device(model: nn.Module, mesh: DeviceMesh | TrainingAxes) -> torch.device:
    """Return where the model is, or, of one on the meta device, is to be."""
    held = {p.device for p in model.parameters() if not p.is_meta}
    kind = mesh.device_type if isinstance(mesh, DeviceMesh) else None
    wrong = [str(device) for device in held if kind is not None and device.type != kind]
    if wrong or len(held) > 1:
        raise UsageError(
            f"the model has parameters on {', '.join(sorted(map(str, held)))}, must have all on one device"
            + (f" of the mesh's type, {kind}" if kind else "")
        )
    if held:
        return held.pop()
    if kind == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.get_default_device() if kind is None else torch.device(kind)


def _require_plain_plan(options: Mapping[str, object], cp_size: int) -> None:
    defaults = {"layout": "zigzag", "strategy": "ring", "overlap": None}
    given = [f"{name}={value!r}" for name, value in options.items() if value != defaults.get(name, False)]
    if given:
        raise UsageError(
            f"{', '.join(given)} with a plan: such options are of the families that are known here; a plan's "
            "styles say what each module does, for example ColumnParallel(sequence_parallel=True)"
        )
    if cp_size > 1:
        raise UsageError(
            f"cp={cp_size} with a plan: the model's own forward tells no layer which tokens of the whole "
            "sequence it holds, so attention would see those of this rank alone; use dp and tp"
        )


def _require_agreement(
    model: nn.Module,
    how: Mapping[str, object],
    axes: TrainingAxes,
    device: torch.device,
    *,
    compare_values: bool,
) -> None:
    """Raise UsageError on every rank where they have different models, or mean different things.

    Ranks that drew weights of their own would train on a mixture of them, and nobody would notice.
    """
    parameters = dict(model.named_parameters())
    facts: dict[str, object] = {"the names of parameters": list(parameters), **how}
    if compare_values:
        facts |= {f"the values of {name}": _checksum(held) for name, held in parameters.items()}
    error: str | None = None
    # Over both axes in any case: a rank that ended after the first would leave others waiting at the second.
    # An axis without a process group, by which one looks at some rank's part, has nobody to ask.
    for axis in (axis for axis in (axes.tp, axes.data) if axis.group is not None):
        error = disagreement("parallelize", facts, error, axis, device) or error
    if error is not None:
        raise UsageError(error)


def _checksum(parameter: nn.Parameter) -> int | None:
    """Return the sum of the bits of all elements as integers, the same in any order; None without values."""
    if parameter.is_meta:
        return None
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.itemsize]
    return int(parameter.detach().view(integers).sum(dtype=torch.int64))


def _on(styles: Mapping[str, Style], device: torch.device, tp: MeshAxis) -> dict[str, Style]:
    """Return the styles, each way to overlap made ready on `device` once."""
    ready: dict[Overlap, Overlap] = {}
    found = dict(styles)
    for name, style in styles.items():
        overlap = getattr(style, "overlap", None)
        if isinstance(overlap, Overlap):
            if overlap not in ready:
                ready[overlap] = overlap.on(device, tp)
            found[name] = dataclasses.replace(cast(Any, style), overlap=ready[overlap])
    return found
