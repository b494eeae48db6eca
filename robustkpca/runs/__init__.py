"""A run on disk: what was asked for, the rows, and how far it came."""
