"""Calls the grammar library on a stack that no grammar of allowed size fills."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

# The library calls itself once for each reference, rule or bracket that lies in another one, and
# takes up to 16 KiB for it; the grammars that are let through have up to 10,000 such levels. Memory
# that is not reached is not taken.
STACK_BYTES = 256 << 20
_stack_size = threading.Lock()  # of the threads that are started next, whoever starts them

Result = TypeVar("Result")


def call_on_deep_stack(function: Callable[[], Result]) -> Result:
    """Waits for it, and raises what it raises."""
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # a panic of the library is no Exception
            future.set_exception(error)

    thread = threading.Thread(target=work, name="grammar", daemon=True)
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return future.result()
