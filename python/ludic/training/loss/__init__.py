"""Losses: one class for each formula. `functional` computes log-probabilities, `context` has what
the losses of one batch share, `kl` has KL penalties and the entropy bonus."""

from ludic.training.loss.base import Loss, as_loss, scaled_loss
from ludic.training.loss.batch import Batch, BatchTotals, Correction, Normalizer
from ludic.training.loss.cispo import CISPOLoss
from ludic.training.loss.clipped import ClippedSurrogateLoss, TokenClippedSurrogateLoss
from ludic.training.loss.composite import CompositeLoss, LossTerm
from ludic.training.loss.context import SharedContext
from ludic.training.loss.correction import (
    IcePop,
    MaskedImportanceSampling,
    TruncatedImportanceSampling,
    resolve_correction,
)
from ludic.training.loss.dpo import DPOLoss
from ludic.training.loss.entropy import EntropyBonus
from ludic.training.loss.gmpo import GMPOLoss
from ludic.training.loss.info_seed import SeedClassificationLoss, SeedContrastiveLoss
from ludic.training.loss.kl import KLLoss, TokenKLLoss
from ludic.training.loss.listwise import ListwiseClipLoss, ListwiseLoss
from ludic.training.loss.logprobs import (
    compute_logp_action,
    compute_token_entropy,
    compute_token_logp,
    compute_token_logp_and_entropy,
    selective_log_softmax,
)
from ludic.training.loss.preference import BradleyTerryLoss
from ludic.training.loss.reference_kl import ReferenceKLLoss
from ludic.training.loss.reinforce import ReinforceBaselineLoss, ReinforceLoss
from ludic.training.loss.sapo import SAPOLoss
from ludic.training.loss.supervised import MaskedCausalLMCrossEntropyLoss

__all__ = [
    "Batch",
    "BatchTotals",
    "BradleyTerryLoss",
    "CISPOLoss",
    "ClippedSurrogateLoss",
    "CompositeLoss",
    "Correction",
    "DPOLoss",
    "EntropyBonus",
    "GMPOLoss",
    "IcePop",
    "KLLoss",
    "ListwiseClipLoss",
    "ListwiseLoss",
    "Loss",
    "LossTerm",
    "MaskedCausalLMCrossEntropyLoss",
    "MaskedImportanceSampling",
    "Normalizer",
    "ReferenceKLLoss",
    "ReinforceBaselineLoss",
    "ReinforceLoss",
    "SAPOLoss",
    "SeedClassificationLoss",
    "SeedContrastiveLoss",
    "SharedContext",
    "TokenClippedSurrogateLoss",
    "TokenKLLoss",
    "TruncatedImportanceSampling",
    "as_loss",
    "compute_logp_action",
    "compute_token_entropy",
    "compute_token_logp",
    "compute_token_logp_and_entropy",
    "resolve_correction",
    "scaled_loss",
    "selective_log_softmax",
]
