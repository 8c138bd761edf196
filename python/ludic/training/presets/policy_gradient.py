"""Policy-gradient algorithms, without a baseline or with one from the batch or the group, and
supervised fine-tuning.
"""

from __future__ import annotations

from ludic.errors import ConfigError, check_value
from ludic.training.algorithm import RLAlgorithm, compose_preprocess, validate_actor_logps
from ludic.training.credit_assignment import (
    BatchNormalizedReturn,
    ConstantCredit,
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    MonteCarloReturn,
    PerStepReward,
)
from ludic.training.group_credit import GreedyBaselineReturn, drop_greedy
from ludic.training.loss import (
    Correction,
    CriticSettings,
    MaskedCausalLMCrossEntropyLoss,
    Normalizer,
    ReinforceBaselineLoss,
    ReinforceLoss,
    TokenClippedSurrogateLoss,
    resolve_correction,
)
from ludic.training.presets.preprocess import check_comparable, check_ratios, drop_zero_weights
from ludic.training.types import CreditAssigner


def make_reinforce(
    *,
    gamma: float = 1.0,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "reinforce",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """REINFORCE: Monte Carlo returns, importance-weighted log-probabilities (Williams 1992)."""
    credit = MonteCarloReturn(gamma=gamma)
    loss = ReinforceLoss()
    checks = drop_zero_weights(drop_zero_weight, drop_zero_weight_eps)
    return RLAlgorithm(name, credit, loss, checks, resolve_correction(correction))


def make_reinforce_baseline(
    *,
    gamma: float = 1.0,
    normalize_adv: bool = False,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "reinforce_baseline",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """REINFORCE (Williams 1992) with the mean return of the batch as the baseline. `normalize_adv`
    divides by the standard deviation of the batch."""
    credit = MonteCarloReturn(gamma=gamma)
    loss = ReinforceBaselineLoss(normalize=normalize_adv)
    checks = drop_zero_weights(drop_zero_weight, drop_zero_weight_eps)
    return RLAlgorithm(name, credit, loss, checks, resolve_correction(correction))


def make_rloo(
    *,
    group_size: int,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    length_normalize: bool = False,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    normalizer: Normalizer = "samples",
    name: str = "rloo",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """RLOO (arXiv:2402.14740, section 3.2): REINFORCE with the mean return of the group's other
    answers as the baseline.

    As in the paper, the log-probability of an answer is a sum over its tokens. With one optimizer
    step per batch, as in the paper, every ratio is 1, the clip has no effect, and the gradient is
    -mean_b A_b sum_t grad log pi_bt. Departures from the paper: with several steps per batch the
    token ratios are clipped as in PPO, and there is no KL term.
    """
    credit = GroupNormalizedReturn(group_size=check_comparable(group_size), leave_one_out=True)
    loss = TokenClippedSurrogateLoss(clip_eps_low, clip_eps_high, length_normalize, normalizer=normalizer)
    checks = check_ratios(drop_zero_weight, drop_zero_weight_eps)
    return RLAlgorithm(name, credit, loss, checks, resolve_correction(correction))


def make_ppo(
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    clip: float = 0.2,
    value_clip: float | None = 0.2,
    critic_lr: float | None = None,
    critic_warmup_steps: int = 0,
    normalize_adv: bool = True,
    bootstrap: bool = False,
    length_normalize: bool = False,
    normalizer: Normalizer = "tokens",
    name: str = "ppo",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with a critic and generalised advantage
    estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    The reward of a step is earned by its last token. gamma and lam apply from token to token, over
    all turns of an episode. With `bootstrap`, an episode that did not terminate goes on with the
    value after its last token. `clip` bounds the ratio on both sides, `value_clip` the change of
    values (`ValueLoss`). `critic_lr`: of a value head 1 / (width of the hidden states), of a model
    the policy's, unless it is set. In the first `critic_warmup_steps` steps only the critic is
    trained. `normalize_adv`: advantages of all action tokens of a batch have mean 0 and standard
    deviation 1. Departures from the paper: policy and critic have optimizers of their own, so no
    coefficient weighs their losses, and there is no bonus for entropy."""
    critic = CriticSettings(gamma, lam, value_clip, critic_lr, critic_warmup_steps, normalize_adv, bootstrap)
    loss = TokenClippedSurrogateLoss(clip, clip, length_normalize, normalizer=normalizer)
    return RLAlgorithm(name, PerStepReward(), loss, validate_actor_logps, resolve_correction(correction), critic=critic)


def make_remax(
    *,
    group_size: int,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    normalizer: Normalizer = "samples",
    name: str = "remax",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """ReMax (arXiv:2310.10505): REINFORCE with the return of the greedy answer as the baseline.

    Each group has `group_size` answers that are trained, one in the paper, and the greedy one,
    which is not. The loss, and its departures from the paper: as `make_rloo`.
    """
    check_value("group_size", group_size, "the greedy answer does not count", least=1)
    credit, checks = GreedyBaselineReturn(group_size + 1), compose_preprocess(drop_greedy, validate_actor_logps)
    loss = TokenClippedSurrogateLoss(clip_eps_low, clip_eps_high, normalizer=normalizer)
    return RLAlgorithm(name, credit, loss, checks, resolve_correction(correction), greedy_baseline=True)


def make_reinforce_plus_plus(
    *,
    group_size: int | None = None,
    group_baseline: bool = False,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    length_normalize: bool = False,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    normalizer: Normalizer = "tokens",
    name: str = "reinforce_plus_plus",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """REINFORCE++ (arXiv:2501.03262): returns normalised over the whole batch, and PPO's clip per
    token.

    `group_baseline` is the paper's variant for several answers to a prompt: the mean of the group
    is subtracted, then the standard deviation over the batch divides. It needs `group_size`. Mean
    and standard deviation are over rollouts, one value each. Departure from the paper: there is no
    KL penalty towards a reference model.
    """
    credit: CreditAssigner = BatchNormalizedReturn()
    if group_baseline:
        if group_size is None:
            raise ConfigError("group_baseline=True subtracts the mean of each group and needs group_size; set it")
        credit = HybridNormalizedReturn(group_size=group_size)
    loss = TokenClippedSurrogateLoss(clip_eps_low, clip_eps_high, length_normalize, normalizer=normalizer)
    checks = check_ratios(drop_zero_weight, drop_zero_weight_eps)
    return RLAlgorithm(name, credit, loss, checks, resolve_correction(correction))


def make_sft(*, length_normalize: bool = False, normalizer: Normalizer = "samples", name: str = "sft") -> RLAlgorithm:
    """Supervised fine-tuning: cross entropy on the action tokens, every sample with weight 1.

    By default a sample's loss is the sum over its tokens, so the gradient grows with their number
    and `max_grad_norm` clips it. `normalizer="tokens"` is the mean over tokens that transformers,
    TRL and `ludic sft` take.
    """
    return RLAlgorithm(name, ConstantCredit(1.0), MaskedCausalLMCrossEntropyLoss(length_normalize, normalizer))
