"""Servers by address: channels, credentials, and what to do when one is lost."""
