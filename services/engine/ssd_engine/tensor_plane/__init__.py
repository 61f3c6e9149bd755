"""Rows of tensors between a draft and its targets, such as the distributions of drawn tokens."""
