"""Speculators: a draft model, or a look-up of n-grams, behind one interface."""
