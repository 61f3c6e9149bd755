"""What servers say of themselves."""
