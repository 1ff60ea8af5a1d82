"""Cross entropy of whole logits against torch.nn.functional.cross_entropy."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paracore.bench.case import Case, Contender, Inputs, Setting, Work, implementation, random_tensor
from paracore.ops.cross_entropy import cross_entropy


def _torch(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


class CrossEntropy(Case):
    """The mean loss of `tokens` labels, and the gradient of the logits."""

    name = "cross_entropy"
    dims = ("tokens", "vocabulary")
    shapes = ((4096, 32000), (8192, 6400))
    baseline = "torch"
    contenders: ClassVar[dict[str, Contender]] = {
        "torch": Contender(lambda _: _torch),
        "native": implementation("native", cross_entropy),
        "triton": implementation("triton", cross_entropy),
        "reference": implementation("reference", cross_entropy),
    }

    def inputs(self, setting: Setting, generator: torch.Generator) -> Inputs:
        """Logits and labels, and the gradient of the loss, 1."""
        tokens, vocabulary = setting.shape
        logits = random_tensor(setting.shape, setting, generator, requires_grad=setting.needs_gradients)
        labels = torch.randint(vocabulary, (tokens,), generator=generator, device=setting.device)
        gradients = (torch.ones((), device=setting.device),) if setting.needs_gradients else ()
        return Inputs({"logits": logits, "labels": labels}, gradients)

    def work(self, setting: Setting) -> Work:
        """Count the logits read in forward; read again and their gradient written in backward.

        Operations per element, an exponential as one: maximum, difference, exponential and sum; backward
        difference, exponential and product.
        """
        elements, backward = math.prod(setting.shape), setting.needs_gradients
        return Work((1 + 2 * backward) * elements * setting.dtype.itemsize, (4 + 3 * backward) * elements)
