"""Targets behind the gateway: who they are, which one serves a request, and its stream."""
