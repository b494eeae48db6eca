"""Samples with stable ids and hashes, and the sources they come from."""
