"""Decoder models, their layers, and the loading of their weights."""
