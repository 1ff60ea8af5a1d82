"""Every kernel's shipped configurations: a new kernel adds its line here."""

from __future__ import annotations

from paracore.kernels import (
    adamw,
    attention,
    cross_entropy,
    embedding,
    matmul,
    partial_sum,
    rms_norm,
    rotary,
    swiglu,
)
from paracore.kernels.configuration import Configuration, Target


def configurations(target: Target) -> list[Configuration]:
    """Return all configurations that the launchers use on `target`."""
    return [
        *rms_norm.configurations(target),
        *attention.configurations(target),
        *adamw.configurations(target),
        *cross_entropy.configurations(target),
        *swiglu.configurations(target),
        *rotary.configurations(target),
        *embedding.configurations(target),
        *matmul.configurations(target),
        *partial_sum.configurations(target),
    ]
