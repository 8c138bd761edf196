"""Supervised fine-tuning."""

from __future__ import annotations

from ludic.training.algorithm import RLAlgorithm
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import MaskedCausalLMCrossEntropyLoss, Normalizer


def make_sft(*, length_normalize: bool = False, normalizer: Normalizer = "samples", name: str = "sft") -> RLAlgorithm:
    """Supervised fine-tuning: cross entropy on the action tokens, every sample with weight 1.

    By default a sample's loss is the sum over its tokens, so the gradient grows with their number
    and `max_grad_norm` clips it. `normalizer="tokens"` is the mean over tokens that transformers,
    TRL and `ludic sft` take.
    """
    return RLAlgorithm(
        name=name,
        credit_assigner=ConstantCredit(value=1.0),
        loss=MaskedCausalLMCrossEntropyLoss(length_normalize=length_normalize, normalizer=normalizer),
    )
