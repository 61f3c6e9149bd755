"""A process that has imported what others need, has no threads, and forks itself for them.

Torch takes seconds to import: whatever is forked here has it at once, and shares its memory. The
server ends with the process that has started it, and its children end with the server, however any
of them ends. No torch, and no gRPC: gRPC's threads do not survive a fork, so it is imported after.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import logging
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import context, reduction
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ssd_engine.process.children import (
    end_with,
    ignore_terminal_signals,
    terminal_signals_held_back,
)

log = logging.getLogger(__name__)

Preload = Sequence[str]  # modules
_NUMBER = struct.Struct("<q")
_NAME_BYTES = 15  # of a process, as Linux shows it
_PR_SET_NAME = 15
_MAX_FILES = 64  # that a child is given
# numpy's linear algebra would start threads when it is imported.
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1"}


class ForkedProcess:
    """A child of a fork server, as whoever asked for it sees it."""

    def __init__(self, name: str, born: int, ended: int) -> None:
        self.name = name
        self.sentinel = ended  # readable once it has ended
        weakref.finalize(self, os.close, ended)
        self._born: int | None = born
        self._pid = 0
        self._exitcode: int | None = None

    @property
    def is_forked(self) -> bool:
        """False while the server is still importing."""
        return self._born is None or bool(wait([self._born], 0))

    @property
    def pid(self) -> int:
        """Waits until it is forked; 0 where that will not be, as the server has ended."""
        if self._born is not None:
            self._pid = _read_number(self._born) or 0
            os.close(self._born)
            self._born = None
        return self._pid

    @property
    def exitcode(self) -> int | None:
        """None: it runs, or is still to be forked. Negative: the signal that has ended it."""
        if self._exitcode is None and wait([self.sentinel], 0):
            code = _read_number(self.sentinel)
            self._exitcode = -signal.SIGKILL if code is None else code  # it went with the server
        return self._exitcode

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, seconds: float | None = None) -> None:
        wait([self.sentinel], seconds)

    def kill(self) -> None:
        if self.is_alive() and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """Starts a fork server. Use from the main thread: the server ends with the thread, and with
    this object."""

    def __init__(self, preload: Preload = ()) -> None:
        """A copy of this process, or a fresh one where this one has threads already. ``preload``:
        what it imports before it forks; meanwhile the caller goes on."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        start = _fork_here if count_threads() == 1 else _start_fresh
        with terminal_signals_held_back():
            self._pid = start(theirs, preload)
        theirs.close()

    def start(self, name: str, target: Callable[..., Any], *args: Any) -> ForkedProcess:
        """Calls ``target`` in a child of the server. Connections and shared memory may be among the
        arguments."""
        born, tell_born = os.pipe()
        ended, tell_ended = os.pipe()
        with _Request(target, args) as request:
            files = [tell_born, tell_ended, *request.files]
            with contextlib.suppress(ConnectionError):  # the server has ended, as the pipes show
                socket.send_fds(self._socket, [name.encode()], files)
        os.close(tell_born)
        os.close(tell_ended)
        return ForkedProcess(name, born, ended)

    def stop(self) -> None:
        """Ends the server and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._socket.close()


def fork_server_here(preload: Preload) -> ForkServer | None:
    """A copy of this process, if it has no threads yet: so it starts at once."""
    return ForkServer(preload) if count_threads() == 1 else None


def count_threads() -> int:
    """Threads of this process, those of libraries among them."""
    return len(list(Path("/proc/self/task").iterdir()))


class _Request:
    """What a child is to do, pickled into memory of its own, and the files that go with it."""

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
        body = os.memfd_create("request")
        self.files = [body]
        context.set_spawning_popen(self)  # type: ignore[arg-type]  # allows multiprocessing's objects to be pickled
        try:
            data = io.BytesIO()
            reduction.dump(sys.path, data)
            reduction.dump((target, args), data)
        finally:
            context.set_spawning_popen(None)
        with open(body, "wb", closefd=False) as file:
            file.write(data.getbuffer())
        os.lseek(body, 0, os.SEEK_SET)

    def __enter__(self) -> "_Request":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.files[0])

    def DupFd(self, index: int) -> "_GivenFile":  # multiprocessing's name for it
        return _GivenFile(index)

    def duplicate_for_child(self, file: int) -> int:
        self.files.append(file)
        return len(self.files) - 1


class _Parents(NamedTuple):
    server: int
    starter: int


# In a child:
_given: list[int] = []  # the files of its request
_parents: _Parents | None = None


def terminate_starter() -> None:
    """Sends SIGTERM to the process that has started this one's server. Where that has ended,
    somebody else is the parent by now, such as process 1 of a container."""
    if _parents is not None and os.getppid() == _parents.server:
        os.kill(_parents.starter, signal.SIGTERM)


class _GivenFile:
    """A file of the request, as the child finds it."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        return _given[self._index]


def _fork_here(theirs: socket.socket, preload: Preload) -> int:
    starter = os.getpid()
    pid = os.fork()
    if pid == 0:
        atexit._clear()  # what the starter does at its end is not done here
        atexit.register(logging.shutdown)
        _serve(socket.socket(fileno=theirs.detach()), starter, preload)
    return pid


def _start_fresh(theirs: socket.socket, preload: Preload) -> int:
    call = f"from {__name__} import serve_fresh; serve_fresh()"
    command = [sys.executable, "-c", call, str(theirs.fileno()), str(os.getpid()), *preload]
    theirs.set_inheritable(True)
    return os.posix_spawn(sys.executable, command, os.environ)


def serve_fresh() -> NoReturn:
    """A fresh process begins here."""
    requests, starter, *preload = sys.argv[1:]
    _serve(socket.socket(fileno=int(requests)), int(starter), preload)


def _serve(requests: socket.socket, starter: int, preload: Preload) -> NoReturn:
    """Forks, and says which children have ended and how, until its end."""
    try:
        ignore_terminal_signals()
        end_with(starter)
        _name_process("ssd-forks")
        with _without_threads():
            for module in preload:
                with contextlib.suppress(ImportError):  # a child that needs it says what is missing
                    importlib.import_module(module)
        gc.collect()
        gc.freeze()  # what is shared with children is looked at by no collection of theirs
        _Server(requests, starter).run()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


@contextmanager
def _without_threads() -> Iterator[None]:
    """Libraries read it when they are loaded; children are not bound by it."""
    before = {name: os.environ.get(name) for name in _NO_THREADS}
    os.environ.update(_NO_THREADS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Server:
    def __init__(self, requests: socket.socket, starter: int) -> None:
        self._requests = requests
        self._starter = starter
        self._ends: dict[int, int] = {}  # by child: where to say that it has ended
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._requests:
                    self._fork()
                else:
                    self._bury(key.fd, key.data)

    def _fork(self) -> None:
        name, files, _, _ = socket.recv_fds(self._requests, 64, _MAX_FILES)
        if not files:  # nobody is left who could ask
            os._exit(0)
        tell_born, tell_ended, *given = files
        server = os.getpid()
        child = os.fork()
        if child == 0:
            self._leave_behind(tell_born, tell_ended)
            _run_child(_Parents(server, self._starter), name.decode(), given)
        os.write(tell_born, _NUMBER.pack(child))
        for each in (tell_born, *given):
            os.close(each)
        self._ends[child] = tell_ended
        self._selector.register(os.pidfd_open(child), selectors.EVENT_READ, child)

    def _leave_behind(self, *files: int) -> None:
        """What is the server's own, in a child."""
        watched = [key.fd for key in self._selector.get_map().values()]
        self._selector.close()
        self._requests.detach()
        for each in (*watched, *self._ends.values(), *files):
            os.close(each)

    def _bury(self, watched: int, child: int) -> None:
        _, status = os.waitpid(child, 0)
        self._selector.unregister(watched)
        os.close(watched)
        ended = self._ends.pop(child)
        with contextlib.suppress(BrokenPipeError):  # nobody wants to know
            os.write(ended, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os.close(ended)


def _run_child(parents: _Parents, name: str, files: list[int]) -> NoReturn:
    global _parents
    code = 1
    try:
        end_with(parents.server)
        _name_process(name)
        _parents = parents
        _given[:] = files
        with open(files[0], "rb") as body:
            sys.path[:] = pickle.load(body)
            target, args = pickle.load(body)
        target(*args)
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _finish(code)


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1


def _finish(code: int) -> NoReturn:
    """As an interpreter ends, but without taking apart what it holds."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _name_process(name: str) -> None:
    """As ps and top show it beside the command."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:_NAME_BYTES], 0, 0, 0)


def _read_number(file: int) -> int | None:
    data = os.read(file, _NUMBER.size)
    return _NUMBER.unpack(data)[0] if data else None
