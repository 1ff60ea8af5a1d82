"""AdamW over flat memory, sharded over the mesh; gradient norm and clipping for other optimizers."""

from paracore.optim.adamw import AdamW
from paracore.optim.fully_sharded import shard_parameters
from paracore.optim.gradient_norm import clip_gradients_, gradient_norm

__all__ = ["AdamW", "clip_gradients_", "gradient_norm", "shard_parameters"]
