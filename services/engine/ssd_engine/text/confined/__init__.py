"""Runs what a model's author has written, in processes with little memory and time."""
