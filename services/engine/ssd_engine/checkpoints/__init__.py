"""Model directories on disk: configuration, weights in safetensors, expansion to larger shapes."""
