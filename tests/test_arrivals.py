"""Messages that a thread waits for from the start: none is held up or lost, and errors reach the caller."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from paracore.arrivals import Arrivals, Batch

WAIT = 10.0  # seconds that anything may take


class Message:
    """A message that arrives when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.arrived, self.waiting, self._error = threading.Event(), threading.Event(), error
        self.waited_by: list[str] = []

    def wait(self) -> None:
        self.waited_by.append(threading.current_thread().name)
        self.waiting.set()
        assert self.arrived.wait(WAIT)
        if self._error is not None:
            raise self._error


@pytest.fixture
def arrivals() -> Iterator[Arrivals]:
    arrivals = Arrivals()
    yield arrivals
    arrivals.close()


def test_a_message_is_waited_for_from_the_start_and_once(arrivals: Arrivals) -> None:
    message = Message()
    batch = arrivals.follow([message])
    assert message.waiting.wait(WAIT)
    message.arrived.set()
    batch.wait()
    batch.wait()
    assert message.waited_by == ["paracore arrivals"]


def test_a_message_that_has_not_arrived_holds_no_later_one_up(arrivals: Arrivals) -> None:
    # The first arrives only when the caller, who has got the second, goes on: a thread that insisted on its
    # order would wait for ever.
    first, second = Message(), Message()
    batches = [arrivals.follow([first]), arrivals.follow([second])]
    assert first.waiting.wait(WAIT)
    second.arrived.set()
    batches[1].wait()
    first.arrived.set()
    batches[0].wait()
    assert second.waited_by == [threading.current_thread().name]


def test_an_error_is_raised_where_the_batch_is_waited_for(arrivals: Arrivals) -> None:
    lost = Message(RuntimeError("connection closed, says the test"))
    batch, after = arrivals.follow([lost]), Message()
    lost.arrived.set()
    after.arrived.set()
    with pytest.raises(RuntimeError, match="says the test"):
        batch.wait()
    arrivals.follow([after]).wait()  # the thread lives on


def test_a_batch_is_there_when_all_its_messages_are() -> None:
    messages = [Message(), Message()]
    for message in messages:
        message.arrived.set()
    batch = Batch(messages)
    assert batch.arrive()
    assert not batch.arrive()
    assert [len(message.waited_by) for message in messages] == [1, 1]
