"""The thin client of SSD: sends a prompt to a target, streams its tokens, and goes on elsewhere.

Nothing in here imports torch or a service; local services are started as processes of their own.
"""
