"""Families of models, a file each: what their layers have, as their config.json says it."""
