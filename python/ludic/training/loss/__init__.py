"""Losses: one class for each formula. `logprobs` computes log-probabilities, `context` has what
the losses of one batch share, `kl` has KL penalties and the entropy bonus."""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
