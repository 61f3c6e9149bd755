"""Kernels of a CPU, with their C sources: products with packed weights, attention, noise."""
