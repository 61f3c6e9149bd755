"""What the target and the draft both know about speculation."""
