"""CUDA, Triton and C kernels, and what compiles and launches them."""
