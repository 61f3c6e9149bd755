"""Targets by way of a gateway: requests and streams of OpenAI's HTTP protocol."""
