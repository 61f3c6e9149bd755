"""Sequences, when they run, and how their rounds are verified."""
