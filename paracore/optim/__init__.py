"""Gradient norm and clipping over a cut model."""

from paracore.optim.gradient_norm import clip_gradients_, gradient_norm

__all__ = ["clip_gradients_", "gradient_norm"]
