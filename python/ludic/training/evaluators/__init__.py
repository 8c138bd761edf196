"""Evaluation during training, on held-out data: the loss, preference metrics, and the interface of
evaluators."""
