"""Events and durations that an engine records."""
