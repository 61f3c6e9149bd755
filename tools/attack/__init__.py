"""Attacks on real services, and what others notice of them."""
