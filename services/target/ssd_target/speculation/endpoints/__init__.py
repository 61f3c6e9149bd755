"""Speculation endpoints as the engine sees them, and the sequences that they may hold."""
