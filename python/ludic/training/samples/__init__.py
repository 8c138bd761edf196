"""Text to samples: conversations, prompts with completions, and preference pairs as token ids with
a mask of what is trained.

Recorded rollouts become samples by `training.rollouts`, which this package imports;
`training.batching` imports both.
"""
