"""Rows, records and states of the tensor plane."""
