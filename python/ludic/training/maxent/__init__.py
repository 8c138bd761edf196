"""MaxEnt-GRPO without torch: `listwise` has the weights of a group in closed form, `credit` the
weights of a macro-batch."""

from ludic.training.maxent.credit import ListwiseCredit
from ludic.training.maxent.listwise import listwise_q, listwise_weights, share_among_best, weight_entropy
from ludic.training.types import Weighed

__all__ = ["ListwiseCredit", "Weighed", "listwise_q", "listwise_weights", "share_among_best", "weight_entropy"]
