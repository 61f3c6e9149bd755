"""Requests and their streams, as the Python API gives them."""
