"""Preferences without a reward model."""

from __future__ import annotations

from ludic.training.algorithm import RLAlgorithm
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss.dpo import DPOLoss, DPOLossType


def make_dpo(
    *,
    beta: float = 0.1,
    loss_type: DPOLossType = "sigmoid",
    label_smoothing: float = 0.0,
    length_normalize: bool | None = None,
    nll_coeff: float = 0.0,
    name: str = "dpo",
) -> RLAlgorithm:
    """Direct preference optimization (arXiv:2305.18290) for `DPOTrainer`; `loss_type="ipo"` is IPO
    (arXiv:2310.12036). `DPOLoss` has the formulas."""
    return RLAlgorithm(
        name=name,
        credit_assigner=ConstantCredit(1.0),
        loss=DPOLoss(beta, loss_type, label_smoothing, length_normalize, nll_coeff),
    )
