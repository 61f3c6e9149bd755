"""What is read of a call, while a signal may strike the main thread at any moment."""

import _thread
import queue
import signal
import threading
from contextlib import closing

import pytest

from ssd_client.connection import responses
from ssd_client.connection.responses import Responses
from ssd_client.connection.waiting import take
from tests.waiting import wait_until


class FakeCall:
    """A call whose responses are put in by the test; an exception among them ends it."""

    def __init__(self, *items: object) -> None:
        self.items: queue.SimpleQueue[object] = queue.SimpleQueue()
        for item in items:
            self.items.put(item)
        self.readers: set[threading.Thread] = set()
        self.taken = 0
        self.used = 0  # by the test
        self.most_ahead = 0
        self.cancelled = False

    def __iter__(self) -> "FakeCall":
        return self

    def __next__(self) -> object:
        self.readers.add(threading.current_thread())
        item = self.items.get()
        if self.cancelled:
            raise RuntimeError("cancelled")
        if isinstance(item, Exception):
            raise item
        self.taken += 1
        self.most_ahead = max(self.most_ahead, self.taken - self.used)
        return item

    def cancel(self) -> None:
        self.cancelled = True
        self.items.put(None)


class Struck(BaseException):
    """What the handler of the test raises."""


@pytest.fixture
def strike():
    """Strikes the main thread after a moment by a signal whose handler raises `Struck`."""

    def handle(number, frame):
        raise Struck

    before = signal.signal(signal.SIGUSR1, handle)
    main = threading.main_thread().ident
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    yield timer.start
    timer.join()
    signal.signal(signal.SIGUSR1, before)


def test_what_ended_the_call_comes_after_what_it_gave():
    call = FakeCall("a", "b", ValueError("lost"))
    with closing(Responses(call)) as read:
        assert [next(iter(read)) for _ in range(2)] == ["a", "b"]
        with pytest.raises(ValueError, match="lost"):
            next(iter(read))
    with closing(Responses(FakeCall(*range(1000), StopIteration()))) as read:
        assert list(read) == list(range(1000))


@pytest.mark.parametrize("at", ["a response", "the end"])
def test_a_signal_interrupts_the_wait_for(strike, at):
    call = FakeCall("a")
    with pytest.raises(Struck), closing(Responses(call)) as read:
        for _ in read:
            strike()
            if at == "the end":
                read.let_end(20)
    assert call.cancelled
    assert threading.main_thread() not in call.readers  # gRPC's locks are not the main thread's


def test_a_signal_that_ends_no_wait_is_noticed_all_the_same():
    """As one that arrives in the moment before the wait: nothing wakes the thread for it."""
    threading.Timer(0.1, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        take(queue.SimpleQueue())


def test_an_end_that_does_not_come_is_not_waited_for_long():
    call = FakeCall("last")
    with closing(Responses(call)) as read:
        next(iter(read))
        read.let_end(0.01)
        assert not call.cancelled
    assert call.cancelled


def test_little_is_read_ahead_of_a_slow_reader(monkeypatch):
    monkeypatch.setattr(responses, "_AHEAD", 3)
    call = FakeCall(*range(40))
    with closing(Responses(call)) as read:
        for item in read:
            assert item == call.used
            call.used += 1
            if call.used == 30:
                break
            ahead = min(40, call.used + 3)
            wait_until(lambda ahead=ahead: call.taken >= ahead)
    assert call.most_ahead <= 4  # the one that is handed over, and three
    wait_until(lambda: not any(reader.is_alive() for reader in call.readers))
