"""Algorithms by name: each `make_` function returns an `RLAlgorithm` with credit assigner, loss and
preprocessing. `registry` lists them.

Common arguments:

- `group_size`: number of answers to one prompt, which are compared with each other.
- `normalize`: what divides advantages, the standard deviation of a group, "population" or "sample"
  (as in TRL and verl), or its "mean" (MaxRL, arXiv:2602.02710).
- `positive_only`: set advantages below 0 to 0.
- `drop_zero_weight`: drop samples with |weight| <= `drop_zero_weight_eps` before training.
- `filter_zvp`: drop groups in which the standard deviation of the weights is at most
  `zvp_filter_eps` (zero-variance prompts).
- `length_normalize`: the loss of a sample is the mean over its tokens instead of the sum.
- `normalizer`: the loss is a mean over "samples", or over all "tokens" of the batch.
- `correction`: corrects for samples of another engine or an older policy: an object of
  `loss.correction` or its name (truncated, masked, icepop, kpop, m2po, dppo).

Every preset lists all its arguments, so its signature is its documentation, and a recipe's
`algorithm_args` are checked against it. A name is imported on first access: reading the registry
does not import torch.
"""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
