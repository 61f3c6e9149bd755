"""Faults: each process of a fleet is killed, stopped and terminated under streams."""
