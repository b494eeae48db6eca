"""Keyed random numbers, memory, and the sharing of work among processes."""
