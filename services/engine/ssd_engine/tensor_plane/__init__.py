"""Tensors between a draft and its targets: distributions that tokens were drawn from."""
