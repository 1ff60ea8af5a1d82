"""Drop-in modules over the mesh, and the decoder built from them."""

from paracore.nn.attention import GroupedQueryAttention
from paracore.nn.config import DecoderConfig
from paracore.nn.decoder import Decoder, complete_state_dict
from paracore.nn.dropout import DropoutDraw
from paracore.nn.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from paracore.nn.mlp import SwiGLU
from paracore.nn.norm import RMSNorm
from paracore.nn.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
    rope_frequencies,
)
from paracore.nn.sequence import SequenceContext
from paracore.nn.vocabulary import Embedding, LMHead

__all__ = [
    "ColumnParallelLinear",
    "Decoder",
    "DecoderConfig",
    "DropoutDraw",
    "Embedding",
    "GroupedQueryAttention",
    "LMHead",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "RMSNorm",
    "RopeScaling",
    "RowParallelLinear",
    "SequenceContext",
    "SwiGLU",
    "YarnScaling",
    "column_parallel",
    "complete_state_dict",
    "rope_frequencies",
]
