"""Algorithms by name: each `make_` function builds the credit assigner, the loss and the
preprocessing of one. `registry` lists them.

Arguments that many of them share:

- `group_size`: answers to one prompt, which are compared with each other.
- `positive_only`: advantages below 0 become 0.
- `drop_zero_weight`: samples with |weight| <= `drop_zero_weight_eps` are dropped before training.
- `filter_zvp`: groups whose weights vary by at most `zvp_filter_eps` are dropped.
- `length_normalize`: a sample's loss is the mean over its tokens instead of their sum.
- `normalizer`: what the loss is a mean over: "samples", or "tokens" for all tokens of the batch.
- `correction`: for samples of another engine or an older policy, an object of `loss.correction` or
  its name (truncated, masked, icepop).

Every preset spells its arguments out, so that its signature is its documentation and a recipe can
check `algorithm_args` against it. A name is imported when it is first read: the registry can be
read without torch.
"""

from ludic._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
