"""Options and output of commands."""
