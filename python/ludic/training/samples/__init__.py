"""Text to samples: conversations, completions and preference pairs as token ids with a mask of the
trained tokens.

Recorded rollouts become samples in `training.rollouts`, which this package imports;
`training.batching` imports both.
"""
