"""The check before the first step: do trainer and sampler compute the same log-probabilities, and
if not, why not?"""
