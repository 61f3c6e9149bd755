"""The routes: each file answers one part of the API."""
