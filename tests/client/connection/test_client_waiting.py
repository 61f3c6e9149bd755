"""A Ctrl-C is noticed whenever it comes."""

import _thread
import queue
import threading

import pytest

from ssd_client.connection.waiting import take


def test_what_comes_is_taken() -> None:
    source: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Timer(0.3, source.put, [7]).start()
    assert take(source) == 7


def test_a_signal_that_ends_no_wait_is_noticed_all_the_same() -> None:
    """As one that arrives in the moment before the wait: nothing wakes the thread for it."""
    source: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Timer(0.1, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        take(source)
