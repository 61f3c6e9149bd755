"""Services that a command starts for itself."""
