"""An EAGLE-3 head: a draft model over a text that is shifted by one, with what its target tells."""
