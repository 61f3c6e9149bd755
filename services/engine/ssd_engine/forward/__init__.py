"""What one forward is given, and what it gives back."""
