"""Memory read and written without arithmetic: the limit of kernels that make one pass over several tensors.

On a CPU one operation of torch after the other would not do: a core that follows several streams at once is
up to 1.6 times as fast. So a loop over all of them is compiled by the machine's C compiler when it is first
needed.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from paracore.errors import UsageError

Kind: TypeAlias = Literal["read", "rewrite", "overwrite", "clear"]
"""rewrite: read, and write the same; overwrite: write zeros; clear: read, then write zeros."""

# `zero` is 0, which the compiler does not know: it can leave nothing out.
_STATEMENTS: dict[Kind, str] = {
    "read": "seen ^= s{0}[i];",
    "rewrite": "s{0}[i] |= zero;",
    "overwrite": "s{0}[i] = zero;",
    "clear": "s{0}[i] &= zero;",
}
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Every thread has one stretch of the elements, as the threads of at::parallel_for have.
_SOURCE = """
#include <pthread.h>
#include <stdint.h>
enum {{ MOST_THREADS = 256 }};
typedef struct {{ void* const* streams; int64_t begin, end, zero; volatile int64_t seen; }} Part;
static void* run(void* argument) {{
  Part* const part = argument;
  const int64_t zero = part->zero;
  int64_t seen = 0;
  {declarations}
  for (int64_t i = part->begin; i < part->end; ++i) {{
    {statements}
  }}
  part->seen = seen;
  return 0;
}}
void move(int64_t elements, int64_t threads, void* const* streams, int64_t zero) {{
  pthread_t started[MOST_THREADS];
  Part parts[MOST_THREADS];
  int64_t others = 0;
  threads = threads < MOST_THREADS ? threads : MOST_THREADS;
  for (int64_t t = 0; t < threads; ++t)
    parts[t] = (Part){{streams, elements * t / threads, elements * (t + 1) / threads, zero, 0}};
  while (others + 1 < threads && !pthread_create(&started[others], 0, run, &parts[others + 1])) ++others;
  for (int64_t t = others + 1; t < threads; ++t) run(&parts[t]); /* could not be started */
  run(&parts[0]);
  for (int64_t t = 0; t < others; ++t) pthread_join(started[t], 0);
}}
"""


def move(streams: Sequence[tuple[Tensor, Kind]]) -> None:
    """Move contiguous tensors of equally many elements, all at once on a CPU, else one after the other.

    Raises UsageError where there is no C compiler.
    """
    first, _ = streams[0]
    if first.device.type != "cpu":
        for x, kind in streams:
            _move_one(x, kind)
        return
    compiled = _compile(tuple((x.itemsize, kind) for x, kind in streams))
    addresses = (ctypes.c_void_p * len(streams))(*(x.data_ptr() for x, _ in streams))
    compiled.move(
        ctypes.c_int64(first.numel()), ctypes.c_int64(torch.get_num_threads()), addresses, ctypes.c_int64(0)
    )


def _move_one(x: Tensor, kind: Kind) -> None:
    integers = x.view(_INTEGERS[x.itemsize])
    if kind == "read":
        x.sum()
    elif kind == "rewrite":
        integers.bitwise_or_(0)
    elif kind == "clear":
        integers.bitwise_and_(0)
    else:
        x.zero_()


@functools.cache
def _compile(streams: tuple[tuple[int, Kind], ...]) -> ctypes.CDLL:
    """Return the loop over streams of so many bytes an element."""
    declarations = "\n  ".join(
        f"uint{8 * size}_t* __restrict const s{i} = part->streams[{i}];"
        for i, (size, _) in enumerate(streams)
    )
    statements = "\n    ".join(_STATEMENTS[kind].format(i) for i, (_, kind) in enumerate(streams))
    source = _SOURCE.format(declarations=declarations, statements=statements)
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "streams.so"
        command = [compiler, "-O3", "-march=native", "-pthread", "-shared", "-fPIC", "-x", "c", "-"]
        try:
            subprocess.run(
                [*command, "-o", str(library)], input=source, text=True, check=True, capture_output=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            raise UsageError(
                f"it is compiled by {compiler}, which fails: {reason.splitlines()[0]}"
            ) from error
        return ctypes.CDLL(str(library))
