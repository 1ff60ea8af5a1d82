"""Every kernel's shipped configurations: a new kernel adds its line here."""

from __future__ import annotations

from paracore.kernels import adamw, attention, rms_norm
from paracore.kernels.configuration import Configuration, Target


def configurations(target: Target) -> list[Configuration]:
    """Return all configurations that the launchers use on `target`."""
    return [
        *rms_norm.configurations(target),
        *attention.configurations(target),
        *adamw.configurations(target),
    ]
