"""paracore's attention under the name "paracore" in transformers."""

from __future__ import annotations

import importlib.metadata
import re

from paracore.errors import UsageError

NAME = "paracore"


def register() -> None:
    """Make `attn_implementation="paracore"` known to transformers, for every model that lets one choose.

    After it `AutoModel.from_config` and `from_pretrained` take `attn_implementation="paracore"`, and
    `model.set_attn_implementation("paracore")` changes a model that exists. Both the attention function and
    the mask function are registered: with the first alone transformers would make no masks, and padding would
    count. Calling it again changes nothing.
    Raises UsageError if transformers, 5.24 or newer but before 6, is not there.
    """
    require_transformers()
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    from paracore.hf.attention_function import attention_function
    from paracore.hf.mask_function import interval_mask, require_known_masks

    require_known_masks()
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, interval_mask)


def require_transformers() -> None:
    """Raise UsageError unless a version of transformers that we know is installed; do not import it."""
    wanted = 'must be >=5.24,<6: pip install "transformers>=5.24,<6"'
    try:
        installed = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(f"transformers is not installed, {wanted}") from None
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers is None or not (5, 24) <= tuple(map(int, numbers.groups())) < (6, 0):
        raise UsageError(f"transformers is {installed}, {wanted}")
