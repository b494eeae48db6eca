"""Keyed random numbers, memory, where a process stands, and claims by which processes share work."""
