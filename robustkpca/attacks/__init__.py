"""Attacks: a registry of methods, the engine that runs them, and those that torchattacks does not have."""
