"""Who holds what, and how it moves: mesh, placements, collectives, gradient sync."""

from paracore.parallel.collectives import (
    all_gather,
    all_reduce,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter,
    scatter_to,
)
from paracore.parallel.gradient_sync import GradientSync
from paracore.parallel.ledger import Ledger, Traffic
from paracore.parallel.mesh import MeshAxis, MeshShape, ShardingAxes, TrainingAxes
from paracore.parallel.overlap import Overlap
from paracore.parallel.placement import ParameterPlacement, collect_placements, shard_range

__all__ = [
    "GradientSync",
    "Ledger",
    "MeshAxis",
    "MeshShape",
    "Overlap",
    "ParameterPlacement",
    "ShardingAxes",
    "Traffic",
    "TrainingAxes",
    "all_gather",
    "all_reduce",
    "collect_placements",
    "copy_to",
    "gather_from",
    "reduce_from",
    "reduce_scatter",
    "scatter_to",
    "shard_range",
]
