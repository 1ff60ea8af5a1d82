"""Messages whose arrival is seen when it happens, not when somebody asks for it.

gloo's record of a message, which torch.profiler shows, ends in the call that waits for it: a message that
arrived long before looks as if it had travelled until then. So a thread waits for messages from the start.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Protocol


class Work(Protocol):
    """What torch.distributed returns of a message under way."""

    def wait(self) -> object:
        """Wait until it has arrived."""


class Batch:
    """Messages of one exchange. Whoever comes first, the thread or the caller, waits for them."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works
        self._claimed, self._done = threading.Lock(), threading.Event()
        self._error: Exception | None = None

    def arrive(self) -> bool:
        """Wait for the messages, unless somebody does already; return whether that was not so."""
        if not self._claimed.acquire(blocking=False):
            return False
        try:
            for work in self._works:
                work.wait()
        except Exception as error:  # noqa: BLE001 (it is the caller's of `wait`, in its thread)
            self._error = error
        finally:
            self._done.set()
        return True

    def wait(self) -> None:
        """Wait until the messages have arrived; raise what waiting for them raised."""
        # The thread may be busy with an earlier batch, which must not hold this one up: it could be a batch
        # that arrives only after the caller has gone on.
        if not self.arrive():
            self._done.wait()
        if self._error is not None:
            raise self._error


class Arrivals:
    """A thread that waits for batches of messages, one after the other, in the order of their start."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        # A daemon: a message that never arrives must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name="paracore arrivals", daemon=True)
        self._thread.start()

    def follow(self, works: Sequence[Work]) -> Batch:
        """Return what is to be waited for in place of `works`."""
        batch = Batch(works)
        self._queue.put(batch)
        return batch

    def close(self) -> None:
        """Let the thread end when it has seen what it was given."""
        self._queue.put(None)

    def _serve(self) -> None:
        while (batch := self._queue.get()) is not None:
            batch.arrive()
