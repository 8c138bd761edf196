"""Losses, credit, batching and the trainer."""
