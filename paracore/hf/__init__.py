"""Models of transformers: their attention interface, and what we know of their architectures."""

from paracore.hf.interface import register

__all__ = ["register"]
