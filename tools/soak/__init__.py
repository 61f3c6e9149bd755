"""Soak: mixed load on loopback while drafts are killed, and what is left behind afterwards."""
