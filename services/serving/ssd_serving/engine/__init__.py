"""The engine's process, seen from the front and from within."""
