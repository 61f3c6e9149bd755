"""Settings that every test shares."""

import os
import signal
from pathlib import Path

# Before torch is loaded: on two busy cores a second thread costs more than it gives.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before Triton is loaded: without a GPU its kernels are interpreted.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts background jobs with Ctrl-C ignored, and children inherit that: tests of Ctrl-C
# would then test nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: likewise
    signal.signal(signal.SIGHUP, lambda number, frame: None)
