"""What runs on a CUDA device alone: kernels, and steps of few rows captured as graphs."""
