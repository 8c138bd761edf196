"""Evaluations during training, on held-out data."""
