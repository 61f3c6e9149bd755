"""Logging, child processes, and other manners of a process."""
