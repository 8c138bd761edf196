"""Checks before the first step: whether the trainer's log-probabilities equal those of the sampler,
and the likely cause if they do not."""
