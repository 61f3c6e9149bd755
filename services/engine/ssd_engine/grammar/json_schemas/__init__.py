"""JSON schemas: their parts, what they take to compile, and the place of what is wrong."""
