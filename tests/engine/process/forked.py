"""What children of a fork server do in its tests."""

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def describe(pipe: Connection) -> None:
    torch = sys.modules.get("torch")
    pipe.send(
        {
            "pid": os.getpid(),
            "server": os.getppid(),
            "name": Path("/proc/self/comm").read_text().strip(),
            "threads of the server": len(list(Path(f"/proc/{os.getppid()}/task").iterdir())),
            "torch": torch is not None,
            "cuda": torch is not None and torch.cuda.is_initialized(),
            "grpc": "grpc" in sys.modules,
            "numpy's threads": os.environ.get("OPENBLAS_NUM_THREADS"),
            "ignores signals": signal.getsignal(signal.SIGTERM) is signal.SIG_IGN,
        }
    )


def end(how: Any) -> None:
    raise how


def stay(pipe: Connection) -> None:
    pipe.send(os.getpid())
    threading.Event().wait()
