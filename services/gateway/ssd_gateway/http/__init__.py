"""What all routes share: keys, limits, errors and server-sent events."""
