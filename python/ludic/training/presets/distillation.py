"""On-policy distillation: the policy learns from a teacher that scores its own samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ludic.errors import ConfigError, check_value
from ludic.training.algorithm import RLAlgorithm
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.distillation import Distillation, Teacher, Teachers
from ludic.training.loss import (
    CompositeLoss,
    Correction,
    DistillationLoss,
    LossTerm,
    Normalizer,
    TokenClippedSurrogateLoss,
    resolve_correction,
)
from ludic.training.presets.preprocess import check_ratios, group_return, token_mean
from ludic.training.types import CreditAssigner, ReferencePolicy


def make_opd(
    *,
    teacher: ReferencePolicy | Teacher | Mapping[str, ReferencePolicy | Teacher] | None = None,
    teacher_column: str = "teacher",
    reward_coeff: float = 0.0,
    divergence: Literal["sampled", "forward", "reverse", "jsd"] = "sampled",
    gamma: float = 0.0,
    top_k: int | None = None,
    jsd_beta: float = 0.5,
    group_size: int | None = None,
    group_normalize_adv: bool = True,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.27,
    length_normalize: bool = False,
    normalizer: Normalizer = "samples",
    correction: Correction | str | None = None,
    name: str = "opd",
) -> RLAlgorithm:
    """On-policy distillation (Thinking Machines 2025; arXiv:2306.08543): the advantage of a token
    is minus its reverse KL towards `teacher`, plus `reward_coeff` times GRPO's advantage of the
    answer.

    `Distillation` has the formula: `gamma` counts later tokens too, and with 1 the gradient is the
    exact gradient of KL(pi || teacher) over answers. `reward_coeff` above 0 needs `group_size`. The
    loss is GRPO's, with its clip and its means. With another `divergence` (GKD, arXiv:2306.13649)
    the loss is `DistillationLoss`, to which `top_k` and `jsd_beta` belong, plus `reward_coeff`
    times GRPO's; without a reward the samples may be of any source. `teacher` is a reference such
    as `FrozenModel`, a `Teacher` with another prompt, or a mapping, in which `teacher_column` of a
    row names the one that scores it. Without one, set the algorithm's before the trainer is made.
    """
    scorer: Any = teacher
    if isinstance(teacher, Teacher | Mapping):
        scorer = Teachers(teacher, teacher_column) if isinstance(teacher, Mapping) else Teachers({"": teacher}, None)
    check_value("divergence", divergence, choices=("sampled", "forward", "reverse", "jsd"))
    if divergence == "sampled" and top_k is not None:
        raise ConfigError(f"top_k ({top_k}) is of a divergence of distributions; set divergence to forward, reverse or jsd")
    if divergence != "sampled" and gamma:
        raise ConfigError(f"gamma ({gamma}) is of divergence=sampled; leave gamma or divergence={divergence} out")
    distillation = Distillation(reward_coeff, gamma)
    credit: CreditAssigner = ConstantCredit(0.0)
    if reward_coeff:
        if group_size is None:
            raise ConfigError(f"reward_coeff ({reward_coeff}) compares the answers of a group; set group_size, or reward_coeff=0")
        credit = group_return(group_size, group_normalize_adv)
    policy = TokenClippedSurrogateLoss(clip_eps_low, clip_eps_high, length_normalize, normalizer=normalizer)
    weighting, checks = resolve_correction(correction), check_ratios(False, 0.0)
    if divergence == "sampled":
        return RLAlgorithm(name, credit, policy, checks, weighting, distillation=distillation, teacher=scorer)
    loss = DistillationLoss(divergence, top_k, jsd_beta, **token_mean(policy))
    if not reward_coeff:
        return RLAlgorithm(name, credit, loss, correction=weighting, teacher=scorer)
    terms = CompositeLoss([LossTerm("policy", policy, reward_coeff), LossTerm("distillation", loss)])
    return RLAlgorithm(name, credit, terms, checks, weighting, teacher=scorer)
