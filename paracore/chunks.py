"""How operations in plain torch keep their higher-precision intermediates small: one piece at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

# What one intermediate of a piece may take. Small enough for a CPU's cache to hold the two or three that
# live at once, and to be nothing beside the tensors of a model; large enough that the work on a piece, some
# tenths of a millisecond on a CPU, outweighs what calling torch costs.
CHUNK_BYTES = 4 << 20

Index = tuple[int | slice, ...]


def chunks(shape: Sequence[int], item_bytes: int) -> Iterator[Index]:
    """Yield indices that cut a tensor with these leading dims into pieces: every item is in one of them.

    shape: the sizes of the dims to cut; item_bytes: what an intermediate takes per item of them. A piece
    takes at most CHUNK_BYTES, or has one item. x[index] is a view whatever the strides of x: nothing is
    flattened, which would copy a transposed tensor.
    """
    if 0 in shape:
        return
    if not shape:
        yield ()
        return
    length, *inner = shape
    slice_bytes = math.prod(inner) * item_bytes
    if inner and slice_bytes > CHUNK_BYTES:
        for i in range(length):
            for index in chunks(inner, item_bytes):
                yield i, *index
        return
    step = max(1, CHUNK_BYTES // max(1, slice_bytes))
    for start in range(0, length, step):
        yield (slice(start, min(start + step, length)),)


def equal_ranges(length: int, most: int) -> Iterator[slice]:
    """Cut `length` into as few ranges of at most `most` as will do, equal but for one."""
    count = -(-length // most) if length else 0
    for number in range(count):
        yield slice(number * length // count, (number + 1) * length // count)
