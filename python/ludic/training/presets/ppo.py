"""PPO with a critic."""

from __future__ import annotations

from ludic.training.algorithm import RLAlgorithm, validate_actor_logps
from ludic.training.credit_assignment import PerStepReward
from ludic.training.loss import Correction, Normalizer, TokenClippedSurrogateLoss, resolve_correction
from ludic.training.loss.value import CriticSettings


def make_ppo(
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    clip: float = 0.2,
    value_clip: float | None = 0.2,
    critic_lr: float | None = None,
    critic_warmup_steps: int = 0,
    normalize_adv: bool = True,
    length_normalize: bool = False,
    normalizer: Normalizer = "tokens",
    name: str = "ppo",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with a critic and generalised advantage
    estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    The reward of a step is earned by its last token. gamma and lam apply from token to token, over
    all turns of an episode; an episode that did not terminate goes on with the value after its last
    token. `clip` bounds the ratio on both sides, `value_clip` the change of values (`ValueLoss`).
    `critic_lr`: 1e-3 of a value head, the policy's of a model, unless it is set. In the first
    `critic_warmup_steps` steps only the critic is trained. `normalize_adv`: advantages of all
    action tokens of a batch have mean 0 and standard deviation 1. Departures from the paper: policy
    and critic have optimizers of their own, so no coefficient weighs their losses, and there is no
    bonus for entropy."""
    critic = CriticSettings(gamma, lam, value_clip, critic_lr, critic_warmup_steps, normalize_adv)
    loss = TokenClippedSurrogateLoss(clip, clip, length_normalize, normalizer=normalizer)
    return RLAlgorithm(name, PerStepReward(), loss, validate_actor_logps, resolve_correction(correction), critic=critic)
