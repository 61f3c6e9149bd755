"""Which tokens may come next, as bits."""

import numpy as np
from numpy.typing import NDArray

Allowed = NDArray[np.uint8]  # a bit for each token, lowest bit first; room for the whole vocabulary
