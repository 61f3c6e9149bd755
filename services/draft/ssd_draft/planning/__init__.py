"""Sequences of targets, and the trees that are planned for them."""
