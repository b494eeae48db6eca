"""Suites: what is perturbed, how, and how much. Plain data, no torch."""
