"""Models of transformers: their attention interface, and what we know of their architectures."""
