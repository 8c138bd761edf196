"""Supervised fine-tuning."""

from __future__ import annotations

from ludic.training.algorithm import RLAlgorithm
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import MaskedCausalLMCrossEntropyLoss, Normalizer


def make_sft(*, length_normalize: bool = False, normalizer: Normalizer = "samples", name: str = "sft") -> RLAlgorithm:
    """Supervised fine-tuning: cross entropy on the action tokens, every sample with weight 1."""
    return RLAlgorithm(
        name=name,
        credit_assigner=ConstantCredit(value=1.0),
        loss=MaskedCausalLMCrossEntropyLoss(length_normalize=length_normalize, normalizer=normalizer),
    )
