"""What a benchmark asks for and measures."""
