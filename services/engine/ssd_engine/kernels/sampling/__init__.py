"""Sampling options, drawing, guesses and rejection over logits on a GPU."""
