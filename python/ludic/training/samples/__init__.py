"""From text to samples: conversations, prompts with completions, and preference pairs as token ids
with an action mask.

`training.rollouts` makes samples from recorded rollouts; this package imports it.
`training.batching` imports both.
"""
