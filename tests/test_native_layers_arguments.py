"""What the native kernels of paracore.reference_layers refuse: the argument, its value, what is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paracore import _C

ONES, LABELS, TOKEN = torch.ones(2, 8), torch.zeros(2, dtype=torch.int64), torch.ones(2)
HEADS, TABLE, POSITIONS = torch.ones(3, 2, 4, 8), torch.ones(5, 4), torch.zeros(3, 2, dtype=torch.int64)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "cross_entropy_statistics": {"logits": ONES, "labels": LABELS},
    "cross_entropy_gradient": {
        "logits": ONES,
        "labels": LABELS,
        "maximum": TOKEN,
        "log_sum": TOKEN,
        "coefficients": torch.ones(3, 2),
        "dlogits": torch.ones(2, 8),
    },
    "swiglu_forward": {"gate": ONES, "up": ONES},
    "swiglu_backward": {"dy": ONES, "gate": ONES, "up": ONES},
    "rotate_pair": {
        "q": HEADS,
        "k": HEADS[:, :, :1],
        "cos": TABLE,
        "sin": TABLE,
        "positions": POSITIONS,
        "q_out": torch.ones(3, 2, 4, 8),
        "k_out": torch.ones(3, 2, 1, 8),
        "inverse": False,
    },
    "embedding_gradient": {"dy": ONES, "tokens": LABELS, "vocab_size": 3},
}
SIZES, STRIDES = r"is Float \[2, 7\] .* must be Float \[2, 8\]", "its last dim must be contiguous"
NARROW, ACROSS = torch.ones(2, 7), torch.ones(8, 2).t()
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("cross_entropy_statistics", {"logits": ONES.double()}, "logits is Double, must be float32 or bfloat16"),
    ("cross_entropy_statistics", {"logits": TOKEN}, r"logits has shape \[2\], must have 2 dims"),
    ("cross_entropy_statistics", {"logits": ACROSS}, f"logits of shape .* {STRIDES}"),
    ("cross_entropy_statistics", {"logits": ONES.to("meta")}, "logits is .* on meta, must be .* on the CPU"),
    ("cross_entropy_statistics", {"labels": LABELS.int()}, r"labels is Int \[2\] .* must be Long \[2\]"),
    ("cross_entropy_statistics", {"labels": LABELS[:1]}, r"labels is Long \[1\] .* must be Long \[2\]"),
    ("cross_entropy_statistics", {"labels": LABELS.repeat(2)[::2]}, f"labels of shape .* {STRIDES}"),
    ("cross_entropy_gradient", {"logits": ONES.half()}, "logits is Half, must be float32 or bfloat16"),
    (
        "cross_entropy_gradient",
        {"maximum": TOKEN.double()},
        r"maximum is Double \[2\] .* must be Float \[2\]",
    ),
    ("cross_entropy_gradient", {"log_sum": torch.ones(3)}, r"log_sum is Float \[3\] .* must be Float \[2\]"),
    (
        "cross_entropy_gradient",
        {"coefficients": ONES},
        r"coefficients is Float \[2, 8\] .* must be Float \[3, 2\]",
    ),
    (
        "cross_entropy_gradient",
        {"coefficients": torch.ones(2, 3).t()},
        "coefficients has strides .* contiguous",
    ),
    (
        "cross_entropy_gradient",
        {"dlogits": ONES.bfloat16()},
        r"dlogits is BFloat16 .* must be Float \[2, 8\]",
    ),
    ("cross_entropy_gradient", {"dlogits": torch.ones(8).expand(2, 8)}, "dlogits of .* must not be expanded"),
    ("swiglu_forward", {"gate": ONES.double()}, "gate is Double, must be float32 or bfloat16"),
    ("swiglu_forward", {"up": NARROW}, f"up {SIZES}"),
    ("swiglu_forward", {"up": ACROSS}, f"up of shape .* {STRIDES}"),
    ("swiglu_forward", {"out": NARROW}, f"out {SIZES}"),
    ("swiglu_forward", {"out": torch.ones(2, 9)[:, :8]}, r"out has strides \[9, 1\], must be contiguous"),
    ("swiglu_backward", {"dy": NARROW}, f"dy {SIZES}"),
    ("swiglu_backward", {"up": ONES.bfloat16()}, r"up is BFloat16 \[2, 8\] .* must be Float \[2, 8\]"),
    ("swiglu_backward", {"out": (NARROW, ONES)}, rf"out\[0\] {SIZES}"),
    ("swiglu_backward", {"out": (ONES, ACROSS)}, r"out\[1\] has strides \[1, 2\], must be contiguous"),
    ("rotate_pair", {"q": HEADS.double()}, "q is Double, must be float32 or bfloat16"),
    ("rotate_pair", {"q": HEADS[0]}, r"q has shape \[2, 4, 8\], must have 4 dims"),
    ("rotate_pair", {"q": torch.ones(3, 2, 8, 4).mT}, f"q of shape .* {STRIDES}"),
    ("rotate_pair", {"k": HEADS[0]}, r"k has shape \[2, 4, 8\], must have 4 dims"),
    ("rotate_pair", {"k": HEADS.bfloat16()}, r"k is BFloat16 .* must be Float \[3, 2, 4, 8\]"),
    ("rotate_pair", {"k": HEADS[..., :6]}, r"k is Float \[3, 2, 4, 6\] .* must be Float \[3, 2, 4, 8\]"),
    ("rotate_pair", {"q": HEADS[..., :7], "k": HEADS[..., :7]}, "q has 7 in its last dim, must be even"),
    ("rotate_pair", {"q_out": HEADS[:2]}, r"q_out is Float \[2, .* must be Float \[3, 2, 4, 8\]"),
    ("rotate_pair", {"k_out": torch.ones(1, 1, 1, 8).expand(3, 2, 1, 8)}, "k_out of .* must not be expanded"),
    ("rotate_pair", {"cos": TOKEN}, r"cos has shape \[2\], must be \[positions, 4\]"),
    ("rotate_pair", {"cos": TABLE.double()}, r"cos is Double \[5, 4\] .* must be Float \[5, 4\]"),
    ("rotate_pair", {"sin": TABLE[:4]}, r"sin is Float \[4, 4\] .* must be Float \[5, 4\]"),
    ("rotate_pair", {"sin": torch.ones(4, 5).t()}, "sin has strides .* must be contiguous"),
    ("rotate_pair", {"positions": POSITIONS.int()}, r"positions is Int \[3, 2\] .* must be Long \[3, 2\]"),
    ("rotate_pair", {"positions": POSITIONS.t()}, r"positions is Long \[2, 3\] .* must be Long \[3, 2\]"),
    (
        "rotate_pair",
        {"positions": POSITIONS - 1},
        r"positions\[0, 0\] is -1, must be one of the 5 rows of cos",
    ),
    (
        "rotate_pair",
        {"positions": torch.tensor([[0, 4], [1, 5], [2, 3]])},
        r"positions\[1, 1\] is 5, must be one of the 5 rows",
    ),
    (
        "rotate_pair",
        {"positions": torch.tensor([[0], [7], [2]]).expand(3, 2)},
        r"positions\[1, 0\] is 7, must be one of the 5 rows",
    ),
    ("embedding_gradient", {"dy": ONES.double()}, "dy is Double, must be float32 or bfloat16"),
    ("embedding_gradient", {"dy": ACROSS}, f"dy of shape .* {STRIDES}"),
    ("embedding_gradient", {"tokens": LABELS.int()}, r"tokens is Int \[2\] .* must be Long \[2\]"),
    ("embedding_gradient", {"tokens": torch.zeros(3).long()}, r"tokens is Long \[3\] .* must be Long \[2\]"),
    ("embedding_gradient", {"vocab_size": -1}, "vocab_size=-1, must be at least 0"),
    *((name, {"capability": "sse9"}, "capability=sse9 cannot run here") for name in ARGUMENTS),
]


@pytest.mark.parametrize(
    ("name", "change", "message"), CASES, ids=[f"{name}-{next(iter(change))}" for name, change, _ in CASES]
)
def test_wrong_arguments_are_named(name: str, change: dict[str, Any], message: str) -> None:
    function = getattr(_C, name)
    with pytest.raises(ValueError, match=message):
        function(**ARGUMENTS[name] | change)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_right_arguments_are_taken(name: str) -> None:
    """So that the cases above differ from these in what they change alone."""
    getattr(_C, name)(**ARGUMENTS[name])
