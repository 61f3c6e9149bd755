"""A draft model as a speculator: its sequences, their forwards, and what these give."""
