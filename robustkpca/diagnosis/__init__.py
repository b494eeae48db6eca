"""Reasons not to believe a number: rules over the rows of a run and the health of its models."""
