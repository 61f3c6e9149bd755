"""Tokens and text: tokenizers, stop strings, chat templates."""
