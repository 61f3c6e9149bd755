"""At start, a loaded model is held against plain torch: every layer, operation by operation."""

from ssd_engine.self_check.check import check_model
from ssd_engine.self_check.expected import TOLERANCE

__all__ = ["TOLERANCE", "check_model"]
