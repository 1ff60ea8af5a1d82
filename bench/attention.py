"""Attention under four masks against torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from paracore.bench.case import (
    Case,
    Contender,
    Function,
    Inputs,
    Setting,
    Work,
    random_tensor,
    refuse_interpreter,
)
from paracore.errors import UsageError
from paracore.parallel import masks
from paracore.parallel.masks import Mask, visible_keys
from paracore.parallel.positions import Positions

DOCUMENTS = 16
WINDOW = 512
# The reference holds several matrices of logits: this many elements in one are 1 GiB in float32.
MAX_REFERENCE_LOGITS = 1 << 28


def mask_of(variant: str, length: int) -> Mask:
    """Return a variant's mask for a sequence of `length`."""
    if variant == "full":
        return masks.full()
    if variant == "causal":
        return masks.causal()
    if variant == "window":
        return masks.sliding_window(WINDOW - 1, 0)
    # Documents of about equal length whose borders lie anywhere in a tile, as real ones do.
    borders = sorted(min(length, length * i // DOCUMENTS + 7 * (i % 5)) for i in range(1, DOCUMENTS))
    return masks.causal() & masks.documents([0, *borders, length])


def intervals(setting: Setting) -> tuple[Tensor, Tensor]:
    """Return the first and the end of the keys that each query sees, each [1, S]."""
    length = setting.shape[3]
    positions = Positions.contiguous(length)
    return visible_keys(mask_of(setting.variant, length), positions, positions, setting.device)


def _torch(setting: Setting) -> Function:
    grouped = setting.shape[1] != setting.shape[2]
    attend = functools.partial(F.scaled_dot_product_attention, enable_gqa=grouped)
    if setting.variant in ("full", "causal"):
        plain = functools.partial(attend, is_causal=setting.variant == "causal")
        return lambda q, k, v: plain(q, k, v)
    first, end = intervals(setting)
    keys = torch.arange(setting.shape[3], device=setting.device)
    visible = (keys >= first[0, :, None]) & (keys < end[0, :, None])  # all that torch can be told
    return lambda q, k, v: attend(q, k, v, attn_mask=visible)


def _torch_backend(backend: SDPBackend) -> Callable[[Setting], Function]:
    def build(setting: Setting) -> Function:
        if setting.device.type == "cpu":
            raise UsageError("on a CPU torch has one fast backend, which the contender torch takes")
        attend = _torch(setting)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            try:
                with sdpa_kernel(backend):
                    return attend(q, k, v)  # type: ignore[return-value]
            except RuntimeError as error:
                raise UsageError(f"torch's {backend.name} refuses: {str(error).splitlines()[0]}") from error

        return attention

    return build


def _paracore(implementation: str) -> Callable[[Setting], Function]:
    def build(setting: Setting) -> Function:
        B, Hq, _, S, _ = setting.shape
        refuse_interpreter(implementation, setting)
        if implementation == "reference" and B * Hq * S * S > MAX_REFERENCE_LOGITS:
            raise UsageError(f"it holds S x S matrices, here of {B * Hq * S * S / 2**30:.2f} * 2^30 numbers")
        from paracore.ops.attention import attention

        return functools.partial(attention, mask=mask_of(setting.variant, S), impl=implementation)

    return build


class Attention(Case):
    """softmax(q k^T / sqrt(D)) v under a mask.

    causal and full; documents: DOCUMENTS of about equal length packed into the sequence, causal within;
    window: causal over the last WINDOW keys. For the last two torch is given a dense boolean mask.
    """

    name = "attention"
    dims = ("batch", "query_heads", "kv_heads", "sequence", "head_dim")
    shapes = ((1, 8, 8, 2048, 64), (1, 8, 2, 2048, 128))
    variants = ("causal", "full", "documents", "window")
    bound = "compute"
    baseline = "torch"
    contenders: ClassVar[dict[str, Contender]] = {
        "torch": Contender(_torch),
        "torch_flash": Contender(_torch_backend(SDPBackend.FLASH_ATTENTION)),
        "torch_cudnn": Contender(_torch_backend(SDPBackend.CUDNN_ATTENTION)),
        "torch_efficient": Contender(_torch_backend(SDPBackend.EFFICIENT_ATTENTION)),
        "native": Contender(_paracore("native")),
        "triton": Contender(_paracore("triton")),
        "reference": Contender(_paracore("reference")),
    }

    def inputs(self, setting: Setting, generator: torch.Generator) -> Inputs:
        """q, k and v, and the gradient of the output."""
        B, Hq, Hkv, S, D = setting.shape
        q, k, v = (
            random_tensor((B, heads, S, D), setting, generator, requires_grad=setting.needs_gradients)
            for heads in (Hq, Hkv, Hkv)
        )
        gradients = (random_tensor((B, Hq, S, D), setting, generator),) if setting.needs_gradients else ()
        return Inputs({"q": q, "k": k, "v": v}, gradients)

    def work(self, setting: Setting) -> Work:
        """Count the products of visible pairs: two forward, five backward (one is computed again).

        Bytes: q, k, v and out; backward reads these and dout and writes dq, dk and dv.
        """
        B, Hq, Hkv, S, D = setting.shape
        first, end = intervals(setting)
        pairs = B * Hq * int((end - first).clamp_min(0).sum())
        products = 7 if setting.needs_gradients else 2
        query_side, key_side = B * Hq * S * D, B * Hkv * S * D
        elements = 2 * query_side + 2 * key_side
        if setting.needs_gradients:
            elements += 4 * query_side + 4 * key_side
        return Work(bytes=elements * setting.dtype.itemsize, flops=2 * products * pairs * D)
