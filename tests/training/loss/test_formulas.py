"""Each loss by hand. Unless a test says otherwise, a batch has one action token per row with
probability 1/2: log pi = ln(1/2) = -0.693147."""

import math

import pytest
import torch
from loss_batches import two_token_batch

from ludic.errors import ConfigError, DataError
from ludic.training.credit_assignment import GroupNormalizedReturn
from ludic.training.loss import (
    CISPOLoss,
    ClippedSurrogateLoss,
    CompositeLoss,
    EntropyBonus,
    GMPOLoss,
    KLLoss,
    LossTerm,
    MaskedCausalLMCrossEntropyLoss,
    ReinforceBaselineLoss,
    ReinforceLoss,
    SAPOLoss,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
)
from ludic.types import Rollout, Step

LN2 = math.log(2.0)


def value(loss, ratios, weights):
    logits, batch = two_token_batch(ratios, weights)
    result, stats = loss.compute(logits, batch)
    assert stats["loss"] == pytest.approx(result.item())
    return result.item(), {k: float(v) for k, v in stats.items()}


def gradient(loss, ratios, weights):
    """d loss / d logit of the sampled token, for each row. With p = 1/2, d log pi / d logit = 1 - p
    = 1/2."""
    logits, batch = two_token_batch(ratios, weights)
    loss.compute(logits, batch)[0].backward()
    return logits.grad[:, 0, 0].tolist()


def test_reinforce_weights_log_probabilities_by_ratio_and_credit():
    # -(1/2)[2 * 1 * (-0.693147) + 0.5 * (-3) * (-0.693147)] = -(1/2)[-1.386294 + 1.039721] =
    # 0.173287
    loss, stats = value(ReinforceLoss(), [2.0, 0.5], [1.0, -3.0])
    assert loss == pytest.approx(0.1732868, abs=1e-6)
    assert stats["ratio_mean"] == pytest.approx(1.25)
    assert stats["ratio_std"] == pytest.approx(0.75)
    assert stats["adv_mean"] == pytest.approx(-1.0)
    assert stats["logp_mean"] == pytest.approx(-LN2)
    # k3: mean of (2 - 1 - ln 2, 0.5 - 1 + ln 2) = mean(0.306853, 0.193147) = 0.25
    assert stats["kl_actor_policy"] == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize(
    "loss", [ReinforceLoss(), ClippedSurrogateLoss(), TokenClippedSurrogateLoss(), CISPOLoss(), SAPOLoss(), GMPOLoss()], ids=str
)
def test_the_logged_kl_to_the_actor_is_k3(loss):
    # r = 2 and 4, whose logarithms do not cancel: (2 - 1 - 0.693147 + 4 - 1 - 1.386294) / 2 =
    # 0.960279
    assert value(loss, [2.0, 4.0], [1.0, 1.0])[1]["kl_actor_policy"] == pytest.approx(0.9602792, abs=1e-6)


def test_the_ratio_of_reinforce_is_detached():
    # d/dlogit of -(1/2) * r A log pi = -(1/2) r A (1/2): rows -0.5 and 0.375. If r were not
    # detached, each would have another term.
    assert gradient(ReinforceLoss(), [2.0, 0.5], [1.0, -3.0]) == pytest.approx([-0.5, 0.375])


def test_the_baseline_is_the_mean_weight():
    # A = (1, 0) - 0.5 = (0.5, -0.5). Both log pi are equal and r = 1, so the loss is 0 and the
    # gradients are -0.125 and 0.125.
    loss, stats = value(ReinforceBaselineLoss(), [1.0, 1.0], [1.0, 0.0])
    assert loss == pytest.approx(0.0, abs=1e-7)
    assert stats["baseline"] == pytest.approx(0.5)
    assert gradient(ReinforceBaselineLoss(), [1.0, 1.0], [1.0, 0.0]) == pytest.approx([-0.125, 0.125])


def test_the_baseline_example_is_a_quarter_and_a_half_when_normalised():
    # Odds such that log pi = -2 in row 0 and -1 in row 1; both ratios are 1. w = (1, 0), so A =
    # (0.5, -0.5): -(1/2)[0.5 * (-2) - 0.5 * (-1)] = 0.25. Normalised, std(w) = 0.5 and A = (1, -1):
    # -(1/2)[-2 + 1] = 0.5.
    odds = torch.tensor([math.exp(-2.0), math.exp(-1.0)])
    logits = torch.stack([(odds / (1 - odds)).log(), torch.zeros(2)], dim=1)[:, None].expand(2, 2, 2)
    _, batch = two_token_batch([1.0, 1.0], [1.0, 0.0])
    batch["old_logp_action"] = torch.tensor([-2.0, -1.0])
    assert ReinforceBaselineLoss().compute(logits, batch)[0].item() == pytest.approx(0.25, abs=1e-6)
    assert ReinforceBaselineLoss(normalize=True).compute(logits, batch)[0].item() == pytest.approx(0.5, abs=1e-6)


def test_reinforce_can_cap_its_ratios():
    # r = 8 capped at 2: -(1/2)[2 * 1 * (-0.693147) + 1 * 1 * (-0.693147)] = 1.5 * 0.693147
    loss, stats = value(ReinforceLoss(ratio_clip=2.0), [8.0, 1.0], [1.0, 1.0])
    assert loss == pytest.approx(1.5 * LN2)
    assert stats["ratio_mean"] == pytest.approx(1.5)


def test_a_normalised_baseline_divides_by_the_population_standard_deviation():
    # std(1, 0) = 0.5, so A = (1, -1) and the gradients are -0.25 and 0.25.
    assert gradient(ReinforceBaselineLoss(normalize=True), [1.0, 1.0], [1.0, 0.0]) == pytest.approx([-0.25, 0.25])


@pytest.mark.parametrize("make", [ClippedSurrogateLoss, TokenClippedSurrogateLoss])
def test_ppo_takes_the_minimum_of_ratio_and_clipped_ratio(make):
    # r = 2, A = 1, range 0.1: -min(2, 1.1) = -1.1
    assert value(make(clip_eps_low=0.1, clip_eps_high=0.1), [2.0], [1.0])[0] == pytest.approx(-1.1)
    # r = 0.5, A = -1, range 0.2: -min(-0.5, -0.8) = 0.8
    assert value(make(clip_eps_low=0.2, clip_eps_high=0.2), [0.5], [-1.0])[0] == pytest.approx(0.8)
    # r = 2, A = -1: -min(-2, -1.1) = 2: a bad action that became more likely is not clipped
    assert value(make(clip_eps_low=0.1, clip_eps_high=0.1), [2.0], [-1.0])[0] == pytest.approx(2.0)


@pytest.mark.parametrize("make", [ClippedSurrogateLoss, TokenClippedSurrogateLoss])
def test_ratio_clip_caps_the_ratio_first(make):
    loss, stats = value(make(clip_eps_low=10.0, clip_eps_high=10.0, ratio_clip=2.0), [10.0, 1.0], [1.0, 1.0])
    assert loss == pytest.approx(-(2.0 + 1.0) / 2)
    assert stats["ratio_clip_frac"] == pytest.approx(0.5)
    assert stats["ratio_mean"] == pytest.approx(1.5)


@pytest.mark.parametrize("make", [ClippedSurrogateLoss, TokenClippedSurrogateLoss])
def test_ppo_has_no_gradient_where_the_advantage_pushes_beyond_the_clip_range(make):
    # Rows: above the range with A > 0 (clipped), in range (-(1/2) r A (1/2) = -0.25 at r = 1),
    # below the range with A > 0 (not clipped: -0.125).
    grads = gradient(make(clip_eps_low=0.1, clip_eps_high=0.1), [2.0, 1.0, 0.5, 0.5], [1.0, 1.0, 1.0, -1.0])
    assert grads == pytest.approx([0.0, -0.125, -0.0625, 0.0])
    _, stats = value(make(clip_eps_low=0.1, clip_eps_high=0.1), [2.0, 1.0, 0.5, 0.5], [1.0, 1.0, 1.0, -1.0])
    assert stats["clip_frac"] == pytest.approx(0.75)


def test_cispo_clips_the_weight_and_keeps_the_gradient_outside_the_clip_range():
    # r = 2, high 0.1: -1.1 * log pi = 1.1 * 0.693147 = 0.762462; the gradient is -1.1 * (1/2) =
    # -0.55
    loss, stats = value(CISPOLoss(clip_eps_high=0.1), [2.0], [1.0])
    assert loss == pytest.approx(1.1 * LN2)
    assert stats["clip_frac"] == 1.0
    assert stats["ratio_mean"] == pytest.approx(2.0)
    assert gradient(CISPOLoss(clip_eps_high=0.1), [2.0], [1.0]) == pytest.approx([-0.55])


def test_cispo_has_no_lower_bound_by_default():
    assert gradient(CISPOLoss(), [0.25], [1.0]) == pytest.approx([-0.125])
    assert gradient(CISPOLoss(clip_eps_low=0.2), [0.25], [1.0]) == pytest.approx([-0.4])


def test_all_policy_gradients_agree_on_policy():
    losses = [ReinforceLoss(), ClippedSurrogateLoss(), TokenClippedSurrogateLoss(), CISPOLoss()]
    grads = [gradient(loss, [1.0, 1.0], [0.7, -1.3]) for loss in losses]
    for other in grads[1:]:
        assert other == pytest.approx(grads[0], abs=1e-6)


def test_sapo_has_a_smooth_gate_for_each_sign_of_the_advantage():
    # Row 0: A = 1, tau 1, r = 2: 4 * sigmoid(1) = 4 * 0.7310586 = 2.9242343.
    # Row 1: A = -1, tau 2, r = 0.5: -(4 / 2) * sigmoid(-1) = -2 * 0.2689414 = -0.5378828.
    # Loss: -(1/2)(2.9242343 - 0.5378828) = -1.1931758.
    loss, stats = value(SAPOLoss(tau_neg=2.0), [2.0, 0.5], [1.0, -1.0])
    assert loss == pytest.approx(-1.1931758, abs=1e-6)
    # Both gates have p (1 - p) = 0.7310586 * 0.2689414 = 0.1966119, times 4 = 0.7864477.
    assert stats["grad_weight_mean"] == pytest.approx(0.7864477, abs=1e-6)
    assert stats["grad_weight_std"] == pytest.approx(0.0, abs=1e-6)
    # -(1/2) * 4 p (1 - p) * r * A * (1/2): -0.25 * 0.7864477 * 2 = -0.3932239 and 0.25 * 0.7864477
    # * 0.5 = 0.0983060
    assert gradient(SAPOLoss(tau_neg=2.0), [2.0, 0.5], [1.0, -1.0]) == pytest.approx([-0.3932239, 0.0983060], abs=1e-6)


def test_gmpo_clips_log_ratios_on_the_pessimistic_side():
    # log r = ln 2 = 0.693 > 0.4. A = 1: min(0.693, 0.4) = 0.4, -e^0.4 = -1.4918247, and no
    # gradient.
    assert value(GMPOLoss(), [2.0], [1.0])[0] == pytest.approx(-1.4918247, abs=1e-6)
    assert gradient(GMPOLoss(), [2.0], [1.0]) == [0.0]
    # A = -1: s log r = -0.693, min(-0.693, -0.4) = -0.693: R = e^(-1 * -0.693) = 2, loss 2,
    # gradient 2 * (1/2) = 1.
    assert value(GMPOLoss(), [2.0], [-1.0])[0] == pytest.approx(2.0)
    assert gradient(GMPOLoss(), [2.0], [-1.0]) == pytest.approx([1.0])
    # A = -1, r = 1/2: s log r = 0.693 is cut to 0.4: R = e^-0.4 = 0.6703200.
    loss, stats = value(GMPOLoss(), [0.5], [-1.0])
    assert loss == pytest.approx(0.67032, abs=1e-6)
    assert stats["clip_frac"] == 1.0
    assert stats["geom_mean_ratio_mean"] == pytest.approx(0.67032, abs=1e-6)
    # ratio_clip 1.25 caps first: -1.25.
    assert value(GMPOLoss(ratio_clip=1.25), [2.0], [1.0])[0] == pytest.approx(-1.25)


def test_gmpo_is_a_geometric_mean_over_tokens_or_a_product():
    logits, batch = three_token_batch()
    batch["actor_logps"] = batch["actor_logps"] - torch.tensor([[0.0, 0.2, 0.1], [0.0, 0.0, 0.0]])  # log r = 0.2, 0.1; 0
    # -(1/2)(e^0.15 + 1) = -(1/2)(1.1618342 + 1); as a product -(1/2)(e^0.3 + 1) = -(1/2)(1.3498588
    # + 1)
    assert GMPOLoss().compute(logits, batch)[0].item() == pytest.approx(-1.0809171, abs=1e-6)
    assert GMPOLoss(length_normalize=False).compute(logits, batch)[0].item() == pytest.approx(-1.1749294, abs=1e-6)


def rollout(reward, name, group):
    step = Step(index=0, prev_obs="", action="", next_obs=None, reward=reward, truncated=False, terminated=True)
    return Rollout(id=name, steps=[step], meta={"request_meta": {"group_id": group}})


RATIO_LOSSES = [
    ReinforceLoss(),
    ClippedSurrogateLoss(),
    TokenClippedSurrogateLoss(),
    TokenClippedSurrogateLoss(ratio_clip=3.0),
    CISPOLoss(),
    SAPOLoss(),
    GMPOLoss(),
]


CAPPED = [
    ReinforceLoss(ratio_clip=3.0),
    ReinforceBaselineLoss(ratio_clip=3.0),
    ClippedSurrogateLoss(ratio_clip=3.0),
    TokenClippedSurrogateLoss(ratio_clip=3.0),
    GMPOLoss(ratio_clip=3.0),
]


@pytest.mark.parametrize("loss", CAPPED, ids=str)
def test_a_cap_keeps_loss_and_gradient_finite_when_the_ratio_overflows_float32(loss):
    # e^200 is infinite in float32, and its product with the 0 of a clip or a weight would be NaN.
    # Weights 1, 0, -1 have mean 0.
    logits, batch = two_token_batch([1.0, 1.0, 1.0], [1.0, 0.0, -1.0])
    batch["old_logp_action"] = batch["old_logp_action"] - 200.0
    batch["actor_logps"] = batch["actor_logps"] - 200.0 * batch["action_mask"]
    result, stats = loss.compute(logits, batch)
    result.backward()
    assert math.isfinite(result.item())
    assert stats["ratio_mean"].item() == pytest.approx(3.0)
    reinforce = isinstance(loss, ReinforceLoss | ReinforceBaselineLoss)
    # REINFORCE: -(1/3) * 3 * A * (1/2). The others have no gradient at the cap.
    assert logits.grad[:, 0, 0].tolist() == pytest.approx([-0.5, 0.0, 0.5] if reinforce else [0.0, 0.0, 0.0])


@pytest.mark.parametrize("loss", [ReinforceLoss(), TokenClippedSurrogateLoss(), ClippedSurrogateLoss()], ids=str)
def test_an_infinite_ratio_without_a_cap_gives_a_loss_that_is_not_finite(loss):
    logits, batch = two_token_batch([1.0], [1.0])
    batch["old_logp_action"] = batch["old_logp_action"] - 200.0
    batch["actor_logps"] = batch["actor_logps"] - 200.0 * batch["action_mask"]
    loss.compute(logits, batch)[0].backward()
    assert not torch.isfinite(logits.grad).all()


def test_logits_of_minus_infinity_outside_the_actions_are_harmless():
    # Row: prompt token 1 is impossible under the policy. The action has probability 1/3, for the
    # actor too.
    logits = torch.zeros(1, 3, 3)
    logits[0, 0, 1] = -math.inf
    logits.requires_grad_()
    ln3 = math.log(3.0)
    batch = {
        "input_ids": torch.tensor([[0, 1, 0]]),
        "action_mask": torch.tensor([[0.0, 0.0, 1.0]]),
        "actor_logps": torch.tensor([[0.0, 0.0, -ln3]]),
        "old_logp_action": torch.tensor([-ln3]),
        "weight": torch.ones(1),
    }
    expected = {ReinforceLoss: ln3, CISPOLoss: ln3, MaskedCausalLMCrossEntropyLoss: ln3, EntropyBonus: -0.01 * ln3}
    expected |= {TokenClippedSurrogateLoss: -1.0, ClippedSurrogateLoss: -1.0, GMPOLoss: -1.0, SAPOLoss: -2.0}
    for kind, want in expected.items():
        logits.grad = None
        result, stats = kind().compute(logits, batch)
        result.backward()
        assert result.item() == pytest.approx(want, abs=1e-6), kind
        assert torch.isfinite(logits.grad).all(), kind
        assert all(math.isfinite(float(stat)) for stat in stats.values()), kind


def test_groups_with_equal_rewards_have_a_gradient_of_exactly_zero():
    # Rewards 0.3 in group a and 1, 0 in group b: the population std of b is 0.5, so its weights are
    # 1 and -1; those of a are exactly 0.
    rewards = {"a": [0.3, 0.3, 0.3], "b": [1.0, 0.0]}
    weights = []
    for group, values in rewards.items():
        credit = GroupNormalizedReturn(group_size=len(values), normalize_adv=True)
        rollouts = [rollout(reward, f"{group}{i}", group) for i, reward in enumerate(values)]
        weights += [credit.compute(rollouts)[(r.id, 0)] for r in rollouts]
    assert weights == pytest.approx([0.0, 0.0, 0.0, 1.0, -1.0])
    for loss in (*RATIO_LOSSES, ReinforceLoss(length_normalize=True)):
        grads = gradient(loss, [1.0, 2.0, 0.5, 1.0, 1.0], weights)
        assert grads[:3] == [0.0, 0.0, 0.0], loss
        assert grads[3] < 0 < grads[4], loss


def test_token_kl_has_three_estimators():
    # log ratio ln 2 in row 0 and -ln 2 in row 1. k1: mean = 0. k2: (ln 2)^2 / 2 = 0.240227. k3:
    # exp(-x) - 1 + x: 0.5 - 1 + 0.693147 and 2 - 1 - 0.693147: mean 0.25.
    expected = {"k1": 0.0, "k2": 0.2402265, "k3": 0.25}
    for estimator, kl in expected.items():
        loss, stats = value(TokenKLLoss(coeff=2.0, estimator=estimator), [2.0, 0.5], [0.0, 0.0])
        assert loss == pytest.approx(2 * kl, abs=1e-6)
        assert stats["kl_mean"] == pytest.approx(kl, abs=1e-6)


def test_sequence_kl_k1_is_the_difference_of_log_probabilities():
    loss, stats = value(KLLoss(coeff=0.5), [4.0, 1.0], [0.0, 0.0])
    assert loss == pytest.approx(0.5 * (2 * LN2 + 0) / 2)
    assert stats["kl_std"] == pytest.approx(LN2)


def test_sequence_kl_has_the_same_estimators():
    # log ratio ln 4 = 1.386294. k2: 0.960906; k3: 1/4 - 1 + 1.386294 = 0.636294.
    assert value(KLLoss(estimator="k2"), [4.0], [0.0])[0] == pytest.approx(0.9609060, abs=1e-6)
    assert value(KLLoss(estimator="k3"), [4.0], [0.0])[0] == pytest.approx(0.6362944, abs=1e-6)
    with pytest.raises(ConfigError, match=r"estimator \('k4'\) must be one of k1, k2, k3"):
        KLLoss(estimator="k4")


def test_entropy_covers_the_positions_that_predict_an_action():
    # Row 0 predicts its action from uniform logits (entropy ln 2). Row 1 has no action, so its
    # entropy must not count.
    logits, batch = two_token_batch([1.0, 1.0], [0.0, 0.0])
    batch["action_mask"] = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    loss, stats = EntropyBonus(coeff=0.1).compute(logits, batch)
    assert loss.item() == pytest.approx(-0.1 * LN2)
    assert stats["entropy_mean"].item() == pytest.approx(LN2)


def test_entropy_without_actions_is_zero():
    logits, batch = two_token_batch([1.0], [0.0])
    batch["action_mask"] = torch.zeros(1, 2)
    assert EntropyBonus().compute(logits, batch)[0].item() == 0.0


def test_cross_entropy_is_weighted_and_weights_are_optional():
    # (1 * ln 2 + 3 * ln 2) / 2 = 2 ln 2; without weights ln 2
    assert value(MaskedCausalLMCrossEntropyLoss(), [1.0, 1.0], [1.0, 3.0])[0] == pytest.approx(2 * LN2)
    logits, batch = two_token_batch([1.0, 1.0], [1.0, 3.0])
    del batch["weight"]
    assert MaskedCausalLMCrossEntropyLoss().compute(logits, batch)[0].item() == pytest.approx(LN2)


def three_token_batch():
    """Row 0 has two action tokens, row 1 has one; vocabulary 2, uniform logits."""
    logits = torch.zeros(2, 3, 2, requires_grad=True)
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    return logits, {
        "input_ids": torch.zeros(2, 3, dtype=torch.long),
        "action_mask": mask,
        "actor_logps": -LN2 * mask,
        "old_logp_action": -LN2 * mask.sum(dim=1),
        "weight": torch.ones(2),
    }


def test_the_three_token_reductions_by_hand():
    logits, batch = three_token_batch()

    def nll(**kwargs):
        return MaskedCausalLMCrossEntropyLoss(**kwargs).compute(logits, batch)[0].item()

    assert nll(length_normalize=False) == pytest.approx((2 + 1) * LN2 / 2)  # sum per row, mean over rows
    assert nll(length_normalize=True) == pytest.approx((1 + 1) * LN2 / 2)  # mean per row
    assert nll(length_normalize=False, normalizer="tokens") == pytest.approx(3 * LN2 / 3)  # one mean over all tokens


def test_length_normalised_sequence_ratio_is_the_geometric_mean():
    logits, batch = three_token_batch()
    batch["old_logp_action"] = batch["old_logp_action"] - torch.tensor(
        [2 * math.log(1.5), 0.0]
    )  # the product of the ratios is 2.25
    _, stats = ClippedSurrogateLoss(clip_eps_low=9.0, clip_eps_high=9.0, length_normalize=True).compute(logits, batch)
    assert stats["ratio_mean"].item() == pytest.approx((1.5 + 1.0) / 2)
    _, stats = ClippedSurrogateLoss(clip_eps_low=9.0, clip_eps_high=9.0).compute(logits, batch)
    assert stats["ratio_mean"].item() == pytest.approx((2.25 + 1.0) / 2)


KEYS = {
    ReinforceLoss: "loss adv_mean adv_std logp_mean ratio_mean ratio_std kl_actor_policy",
    ReinforceBaselineLoss: "loss adv_mean adv_std logp_mean ratio_mean ratio_std kl_actor_policy baseline",
    ClippedSurrogateLoss: "loss ratio_mean ratio_std clip_frac ratio_clip_frac kl_actor_policy adv_mean adv_std logp_mean",
    TokenClippedSurrogateLoss: "loss ratio_mean ratio_std clip_frac ratio_clip_frac kl_actor_policy adv_mean adv_std logp_mean "
    "avg_action_tokens",
    CISPOLoss: "loss ratio_mean ratio_std clip_frac kl_actor_policy adv_mean adv_std logp_mean avg_action_tokens",
    TokenKLLoss: "loss kl_mean kl_std ratio_mean ratio_std avg_action_tokens",
    KLLoss: "loss kl_mean kl_std",
    EntropyBonus: "loss entropy_mean avg_action_tokens",
    MaskedCausalLMCrossEntropyLoss: "loss logp_mean nll_mean avg_action_tokens",
    SAPOLoss: "loss ratio_mean ratio_std kl_actor_policy adv_mean adv_std logp_mean avg_action_tokens grad_weight_mean "
    "grad_weight_std",
    GMPOLoss: "loss ratio_mean ratio_std clip_frac ratio_clip_frac kl_actor_policy adv_mean adv_std logp_mean avg_action_tokens "
    "geom_mean_ratio_mean geom_mean_ratio_std",
}


@pytest.mark.parametrize("kind", KEYS, ids=lambda kind: kind.__name__)
def test_a_loss_reports_its_documented_statistics_as_detached_scalars(kind):
    logits, batch = three_token_batch()
    _, stats = kind().compute(logits, batch)
    assert set(stats) == set(KEYS[kind].split())
    assert all(stat.shape == () and not stat.requires_grad for stat in stats.values())
    if "avg_action_tokens" in stats:
        assert stats["avg_action_tokens"].item() == 1.5  # 2 and 1


def test_a_composite_adds_weighted_terms_and_prefixes_their_statistics():
    logits, batch = two_token_batch([2.0], [1.0])
    terms = [LossTerm("pg", CISPOLoss(clip_eps_high=0.1)), LossTerm("kl", KLLoss(coeff=1.0), weight=0.5)]
    loss, stats = CompositeLoss(terms).compute(logits, batch)
    # 1.1 ln 2 + 0.5 * ln 2 = 1.6 ln 2
    assert loss.item() == pytest.approx(1.6 * LN2)
    assert stats["loss"].item() == pytest.approx(1.6 * LN2)
    assert stats["pg/loss"].item() == pytest.approx(1.1 * LN2)
    assert stats["kl/loss"].item() == pytest.approx(LN2)
    assert stats["kl/weight"] == 0.5
    assert stats["kl/kl_mean"].item() == pytest.approx(LN2)
    assert set(stats) == {
        "loss", "pg/loss", "pg/weight", "pg/ratio_mean", "pg/ratio_std", "pg/clip_frac", "pg/kl_actor_policy", "pg/adv_mean",
        "pg/adv_std", "pg/logp_mean", "pg/avg_action_tokens", "kl/loss", "kl/weight", "kl/kl_mean", "kl/kl_std",
    }  # fmt: skip


def test_a_composite_calls_a_loss_without_a_shared_argument():
    class Square:
        def compute(self, logits, batch):
            loss = (logits**2).mean() + 1.0
            return loss, {"loss": loss.detach()}

    logits, batch = two_token_batch([1.0], [1.0])
    assert CompositeLoss([LossTerm("square", Square())]).compute(logits, batch)[0].item() == pytest.approx(1.0)


def test_weights_of_zero_have_a_gradient_of_exactly_zero():
    for loss in (ReinforceLoss(), ClippedSurrogateLoss(), TokenClippedSurrogateLoss(), CISPOLoss()):
        assert loss.zero_weight_is_zero_gradient
        assert gradient(loss, [2.0, 0.5, 1.0], [0.0, 0.0, 0.0]) == [0.0, 0.0, 0.0]


def test_invalid_settings_are_refused():
    with pytest.raises(ValueError, match=r"clip_eps_low must be non-negative, got -0\.1"):
        ClippedSurrogateLoss(clip_eps_low=-0.1)
    with pytest.raises(ValueError, match=r"clip_eps_high must be non-negative, got -0\.1"):
        CISPOLoss(clip_eps_high=-0.1)
    with pytest.raises(ValueError, match=r"ratio_clip \(0.0\) must be above 0"):
        TokenClippedSurrogateLoss(ratio_clip=0.0)
    with pytest.raises(ValueError, match="at least one"):
        CompositeLoss([])
    with pytest.raises(ValueError, match=r"tau_neg \(0\) must be above 0"):
        SAPOLoss(tau_neg=0)
    with pytest.raises(ValueError, match=r"clip_eps_high must be non-negative, got -1\.0"):
        GMPOLoss(clip_eps_high=-1.0)
    with pytest.raises(ConfigError, match="exclude each other"):
        CISPOLoss(normalizer="tokens")
    with pytest.raises(ConfigError, match=r"estimator \('k4'\) must be one of k1, k2, k3"):
        TokenKLLoss(estimator="k4")


def test_the_older_single_range_sets_both_sides_and_warns():
    with pytest.warns(DeprecationWarning, match="clip_eps_low and clip_eps_high"):
        loss = ClippedSurrogateLoss(clip_eps=0.2)
    assert (loss.clip_eps_low, loss.clip_eps_high) == (0.2, 0.2)


@pytest.mark.parametrize("loss", [TokenClippedSurrogateLoss(), CISPOLoss(), TokenKLLoss()], ids=lambda loss: type(loss).__name__)
def test_token_losses_name_a_missing_key_or_a_wrong_shape(loss):
    logits, batch = two_token_batch([1.0], [1.0])
    with pytest.raises(KeyError, match="actor_logps"):
        loss.compute(logits, {key: v for key, v in batch.items() if key != "actor_logps"})
    with pytest.raises(DataError, match="shape"):
        loss.compute(logits, {**batch, "actor_logps": torch.zeros(1, 3)})


@pytest.mark.parametrize("loss", [ReinforceLoss(), ReinforceBaselineLoss(), ClippedSurrogateLoss(), KLLoss()], ids=str)
def test_sequence_losses_name_the_missing_key(loss):
    logits, batch = two_token_batch([1.0], [1.0])
    with pytest.raises(KeyError, match="old_logp_action"):
        loss.compute(logits, {key: v for key, v in batch.items() if key != "old_logp_action"})


def test_statistics_without_any_action_are_zero():
    logits, batch = two_token_batch([1.0], [1.0])
    batch["action_mask"] = torch.zeros(1, 2)
    for loss in (TokenClippedSurrogateLoss(), CISPOLoss(), SAPOLoss(), GMPOLoss()):
        _, stats = loss.compute(logits, batch)
        assert {float(stats[key]) for key in ("ratio_mean", "clip_frac", "kl_actor_policy") if key in stats} == {0.0}
