"""Exact, fast, parallel training of Transformers: kernels, layers and the proof that they agree.

`attention` and `scaled_dot_product_attention` are the fused attention, `masks` what it may see and
`Positions` where. Then go on with `paracore.nn` for the drop-in layers and the decoder,
`paracore.parallel` for the mesh and the collectives, `paracore.reference` for the definition of every
operation, and the command `paracore validate` for the proof that a parallel model equals the dense one.
"""

from paracore.ops.attention import attention
from paracore.ops.scaled_dot_product_attention import scaled_dot_product_attention
from paracore.parallel import masks
from paracore.parallel.positions import Positions

__version__ = "0.1.0"

__all__ = ["Positions", "attention", "masks", "scaled_dot_product_attention"]
