"""A loaded model is held against plain torch at start: every layer, operation by operation."""
