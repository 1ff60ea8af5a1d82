"""The LM head with its loss against torch's matmul and cross entropy."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paracore.bench.case import Case, Contender, Inputs, Setting, Work, implementation, random_tensor
from paracore.ops.linear_cross_entropy import linear_cross_entropy


def _torch(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


class LinearCrossEntropy(Case):
    """The mean loss of `tokens` labels from hidden states, and the gradients of these and of the weight."""

    name = "linear_cross_entropy"
    dims = ("tokens", "hidden", "vocabulary")
    shapes = ((4096, 512, 32000), (4096, 2048, 32000))
    bound = "compute"
    baseline = "torch"
    contenders: ClassVar[dict[str, Contender]] = {
        "torch": Contender(lambda _: _torch),
        "native": implementation("native", linear_cross_entropy),
        "triton": implementation("triton", linear_cross_entropy),
        "reference": implementation("reference", linear_cross_entropy),
    }

    def inputs(self, setting: Setting, generator: torch.Generator) -> Inputs:
        """Hidden states, weight and labels, and the gradient of the loss, 1."""
        tokens, hidden, vocabulary = setting.shape
        needed = setting.needs_gradients
        x = random_tensor((tokens, hidden), setting, generator, requires_grad=needed)
        weight = random_tensor((vocabulary, hidden), setting, generator)
        weight = weight.mul_(hidden**-0.5).requires_grad_(needed)
        labels = torch.randint(vocabulary, (tokens,), generator=generator, device=setting.device)
        gradients = (torch.ones((), device=setting.device),) if needed else ()
        return Inputs({"hidden": x, "weight": weight, "labels": labels}, gradients)

    def work(self, setting: Setting) -> Work:
        """Count the products, one forward and two backward, and each tensor once; logits need not exist."""
        tokens, hidden, vocabulary = setting.shape
        elements, backward = (tokens + vocabulary) * hidden, setting.needs_gradients
        bytes_ = (1 + 2 * backward) * elements * setting.dtype.itemsize
        return Work(bytes_, 2 * (1 + 2 * backward) * math.prod(setting.shape))
