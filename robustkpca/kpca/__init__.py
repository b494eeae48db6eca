"""Attention as kernel PCA: theory, analysis of a model, its page and plots."""
