"""Losses of policies, each with the settings that have code of their own."""

from ludic.training.loss import (
    CISPOLoss,
    ClippedSurrogateLoss,
    CompositeLoss,
    EntropyBonus,
    KLLoss,
    LossTerm,
    MaskedCausalLMCrossEntropyLoss,
    ReinforceBaselineLoss,
    ReinforceLoss,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
)
from ludic.training.loss.gmpo import GMPOLoss
from ludic.training.loss.sapo import SAPOLoss

LOSSES = {
    "reinforce": ReinforceLoss(length_normalize=True),
    "reinforce_baseline": ReinforceBaselineLoss(length_normalize=True),
    "reinforce_baseline_normalized": ReinforceBaselineLoss(normalize=True, length_normalize=True),
    "gspo": ClippedSurrogateLoss(clip_eps_low=0.5, clip_eps_high=0.5, length_normalize=True),
    "grpo": TokenClippedSurrogateLoss(ratio_clip=10.0),
    "grpo_by_row": TokenClippedSurrogateLoss(length_normalize=True),
    "dapo": TokenClippedSurrogateLoss(normalizer="tokens"),
    "cispo": CISPOLoss(),
    "cispo_tokens": CISPOLoss(length_normalize=False, normalizer="tokens"),
    "gmpo": GMPOLoss(),
    "sapo": SAPOLoss(),
    "token_kl": TokenKLLoss(coeff=1.0),
    "kl": KLLoss(length_normalize=True),
    "entropy": EntropyBonus(coeff=1.0),
    "supervised": MaskedCausalLMCrossEntropyLoss(),
    "composite": CompositeLoss(
        [LossTerm("pg", CISPOLoss(length_normalize=False, normalizer="tokens")), LossTerm("kl", TokenKLLoss(), 0.5)]
    ),
    "composite_entropy": CompositeLoss([LossTerm("pg", TokenClippedSurrogateLoss()), LossTerm("h", EntropyBonus(0.1))]),
}
