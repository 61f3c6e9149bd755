"""What front and engine tell each other."""
