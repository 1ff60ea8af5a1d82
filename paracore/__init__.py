"""Exact, fast, parallel training of Transformers: kernels, layers and the proof that they agree.

`fuse` gives a model that exists our kernels, `parallelize` any mesh.
`attention` and `scaled_dot_product_attention` are the fused attention, `ring_attention` the same over a
sequence that `layouts` deal out to ranks; `masks` say what queries may see, `Positions` where they are.
`cross_entropy` and `linear_cross_entropy` are the loss, over a vocabulary cut over ranks too.
Then go on with `paracore.nn` for the drop-in layers and the decoder, `paracore.parallel` for the mesh and
the collectives, `paracore.reference` for the definition of every operation, and the command
`paracore validate` for the proof that a parallel model equals the dense one.
"""

from paracore.dropin.fuse import fuse
from paracore.dropin.parallelize import parallelize
from paracore.ops.attention import attention
from paracore.ops.cross_entropy import cross_entropy
from paracore.ops.linear_cross_entropy import linear_cross_entropy
from paracore.ops.ring_attention import ring_attention
from paracore.ops.scaled_dot_product_attention import scaled_dot_product_attention
from paracore.parallel import layout as layouts
from paracore.parallel import masks
from paracore.parallel.positions import Positions

__version__ = "0.1.0"

__all__ = [
    "Positions",
    "attention",
    "cross_entropy",
    "fuse",
    "layouts",
    "linear_cross_entropy",
    "masks",
    "parallelize",
    "ring_attention",
    "scaled_dot_product_attention",
]
