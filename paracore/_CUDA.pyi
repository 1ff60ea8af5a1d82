"""The CUDA sources, built where torch is a CUDA build and nvcc is there (csrc/cuda)."""

def wait_for_counter(stream: int, counters: int, chunk: int, expected: int, timeout_seconds: float) -> None:
    """Let what `stream` is given next wait until counters[chunk] has reached `expected`.

    stream: the `cuda_stream` of a torch.cuda.Stream of the current device. counters: the `data_ptr()` of an
    int32 tensor on it, which is raised with release semantics at the scope of the system. Numbers are
    compared cyclically: a has reached b if the 32-bit difference a - b is not negative. A thread of the
    device waits, not the host. After `timeout_seconds` it prints the chunk with what it found and expected,
    and traps: CUDA calls fail from then on.

    Raises ValueError for a timeout that is not positive, RuntimeError where the launch fails.
    """
