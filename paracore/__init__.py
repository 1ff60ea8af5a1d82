"""Exact, fast, parallel training of Transformers: kernels, layers and the proof that they agree.

Start with `paracore.nn` for the drop-in layers and the decoder, `paracore.parallel` for the mesh
and the collectives, `paracore.reference` for the definition of every operation, and the command
`paracore validate` for the proof that a parallel model equals the dense one.
"""

__version__ = "0.1.0"
