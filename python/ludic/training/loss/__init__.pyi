from ludic.training.loss.base import Loss as Loss, as_loss as as_loss, scaled_loss as scaled_loss
from ludic.training.loss.batch import (
    Batch as Batch,
    BatchTotals as BatchTotals,
    Correction as Correction,
    Normalizer as Normalizer,
)
from ludic.training.loss.cispo import CISPOLoss as CISPOLoss
from ludic.training.loss.clipped import (
    ClippedSurrogateLoss as ClippedSurrogateLoss,
    TokenClippedSurrogateLoss as TokenClippedSurrogateLoss,
)
from ludic.training.loss.composite import CompositeLoss as CompositeLoss, LossTerm as LossTerm
from ludic.training.loss.context import SharedContext as SharedContext
from ludic.training.loss.correction import (
    DPPO as DPPO,
    M2PO as M2PO,
    IcePop as IcePop,
    KPop as KPop,
    MaskedImportanceSampling as MaskedImportanceSampling,
    TruncatedImportanceSampling as TruncatedImportanceSampling,
    resolve_correction as resolve_correction,
)
from ludic.training.loss.distillation import DistillationLoss as DistillationLoss
from ludic.training.loss.dpo import DPOLoss as DPOLoss
from ludic.training.loss.gmpo import GMPOLoss as GMPOLoss
from ludic.training.loss.info_seed import (
    SeedClassificationLoss as SeedClassificationLoss,
    SeedContrastiveLoss as SeedContrastiveLoss,
)
from ludic.training.loss.kl import EntropyBonus as EntropyBonus, KLLoss as KLLoss, TokenKLLoss as TokenKLLoss
from ludic.training.loss.kto import KTOLoss as KTOLoss
from ludic.training.loss.listwise import ListwiseClipLoss as ListwiseClipLoss, ListwiseLoss as ListwiseLoss
from ludic.training.loss.logprobs import (
    compute_logp_action as compute_logp_action,
    compute_token_entropy as compute_token_entropy,
    compute_token_logp as compute_token_logp,
    compute_token_logp_and_entropy as compute_token_logp_and_entropy,
    selective_log_softmax as selective_log_softmax,
)
from ludic.training.loss.preference import BradleyTerryLoss as BradleyTerryLoss
from ludic.training.loss.reference_kl import ReferenceKLLoss as ReferenceKLLoss
from ludic.training.loss.reinforce import ReinforceBaselineLoss as ReinforceBaselineLoss, ReinforceLoss as ReinforceLoss
from ludic.training.loss.sapo import SAPOLoss as SAPOLoss
from ludic.training.loss.supervised import MaskedCausalLMCrossEntropyLoss as MaskedCausalLMCrossEntropyLoss
from ludic.training.loss.value import CriticSettings as CriticSettings, ValueLoss as ValueLoss
