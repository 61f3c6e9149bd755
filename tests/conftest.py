"""Settings that every test shares."""

import os

# Before torch is loaded: on two busy cores a second thread costs more than it gives.
os.environ.setdefault("OMP_NUM_THREADS", "1")
