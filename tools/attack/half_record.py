"""Engines that stop inside a record: the front has read half of it, and the rest does not come."""

import os
from pathlib import Path

# The engine removes the file, writes half of its next record, and stops; what continues it gets the
# rest first.
HALF_A_RECORD = """
import os, signal, sys
from multiprocessing.connection import Connection

sys.path[:] = [path for path in sys.path if path != os.environ["HALF_A_RECORD_PATH"]]
send_bytes = Connection.send_bytes

def send_in_halves(self, data, *rest):
    stop = os.environ["HALF_A_RECORD"]
    name = open("/proc/self/comm").read().strip()
    if name != "ssd-engine" or not os.path.exists(stop):
        return send_bytes(self, data, *rest)
    os.remove(stop)
    record = len(data).to_bytes(4, "big") + data
    half = len(record) // 2
    os.write(self.fileno(), record[:half])
    os.kill(os.getpid(), signal.SIGSTOP)
    os.write(self.fileno(), record[half:])

Connection.send_bytes = send_in_halves
"""


def half_a_record(folder: Path, stop: Path) -> dict[str, str]:
    """Variables of a service whose engine stops inside a record once the file ``stop`` is there:
    every process of it imports what replaces the pipe's writing."""
    hook = folder / "half-a-record"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HALF_A_RECORD)
    path = os.pathsep.join(filter(None, (str(hook), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "HALF_A_RECORD": str(stop), "HALF_A_RECORD_PATH": str(hook)}
