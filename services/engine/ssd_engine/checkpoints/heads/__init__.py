"""Heads that draft from a target's hidden states (EAGLE-3): their config.json and their weights."""
