"""The loss functions, against the formulas of the papers as TRL and verl compute them, written out
here by hand, and against a Hugging Face model's own loss."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from benches.python import loss_peers
from hypothesis import settings
from training_samples import tiny_model

from ludic import _core
from ludic.errors import ConfigError, DataError
from ludic.rollouts.training.rl_losses import PPOLoss, compute_group_advantages, grpo_loss, ppo_loss, sft_loss
from ludic.training.batching.packing import to_tensors
from ludic.training.loss import BatchTotals, SharedContext
from ludic.training.loss.base import scaled_loss

B, T, V = 3, 7, 11
SEEDS = range(settings.default.max_examples // 4)
"""Of the random batches of a test."""


def draw(seed, dtype=torch.float32):
    """A batch with rows of different lengths: prompts of 2 tokens, then answers."""
    generator = torch.Generator().manual_seed(seed)
    random = partial(torch.randn, generator=generator, dtype=dtype)
    lengths = torch.randint(3, T + 1, (B,), generator=generator)
    column = torch.arange(T)
    mask = ((column >= 2) & (column < lengths[:, None])).to(dtype)
    ids = torch.randint(0, V, (B, T), generator=generator)
    logits = random(B, T, V)
    logp = torch.zeros(B, T, dtype=dtype)
    logp[:, 1:] = token_logps(logits, ids)
    return {
        "logits": logits.requires_grad_(),
        "labels": ids,
        "loss_mask": mask,
        "advantages": random(B),
        "token_advantages": random(B, T),
        "old_log_probs": logp + 0.5 * random(B, T),
        "ref_log_probs": logp + 0.3 * random(B, T),
        "lengths": lengths,
    }


def token_logps(logits, ids):
    """[B, T - 1] log-probability of token t + 1 from the logits of token t."""
    return torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]


def aggregate(values, mask, how):
    """token: DAPO eq. 8. sequence: GRPO eq. 3. constant: Dr. GRPO, whose constant is 1 here."""
    if how == "token":
        return (values * mask).sum() / mask.sum()
    sums = (values * mask).sum(1)
    return (sums / mask.sum(1) if how == "sequence" else sums).mean()


def verl_policy_loss(logits, ids, mask, advantages, old, *, low, high, dual, how):
    """PPO eq. 7 and dual clip eq. 5, as verl computes them: from losses, with maxima."""
    ratio = torch.exp(token_logps(logits, ids) - old[:, 1:])
    advantages = advantages[:, None] if advantages.ndim == 1 else advantages[:, 1:]
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if dual is not None:
        clipped = torch.where(advantages < 0, torch.minimum(-advantages * dual, clipped), clipped)
    return aggregate(clipped, mask[:, 1:], how)


def gradient(loss, logits):
    return torch.autograd.grad(loss, logits)[0]


def assert_close(own, expected, logits, atol=1e-6):
    value = float(expected.detach())
    assert abs(float(own.detach()) - value) < atol * max(1.0, abs(value))
    theirs = gradient(expected, logits)
    assert (gradient(own, logits) - theirs).abs().max() < atol * max(1.0, float(theirs.abs().max()))


CLIPS = [(0.2, 0.2, None), (0.2, 0.28, None), (0.1, 0.3, 1.5)]


@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
@pytest.mark.parametrize(("low", "high", "dual"), CLIPS)
def test_ppo_loss_is_that_of_the_papers(how, low, high, dual):
    for seed in SEEDS:
        batch = draw(seed)
        mask = batch["loss_mask"]
        for advantages in (batch["advantages"], batch["token_advantages"]):
            arguments = batch["logits"], batch["labels"], mask, advantages, batch["old_log_probs"]
            own = ppo_loss(*arguments, clip_low=low, clip_high=high, dual_clip=dual, aggregation=how)
            assert_close(own, verl_policy_loss(*arguments, low=low, high=high, dual=dual, how=how), batch["logits"])


def test_ppo_loss_with_one_old_value_per_row_has_one_ratio_per_row():
    """GSPO eq. 5 to 7: the geometric mean of the token ratios."""
    for seed in SEEDS:
        batch = draw(seed)
        mask = batch["loss_mask"][:, 1:]
        old = torch.randn(B, generator=torch.Generator().manual_seed(seed)) * 0.1 - 2.3
        ratio = torch.exp((token_logps(batch["logits"], batch["labels"]) * mask).sum(1) / mask.sum(1) - old)
        objective = torch.minimum(ratio * batch["advantages"], ratio.clamp(0.8, 1.2) * batch["advantages"])
        own = ppo_loss(batch["logits"], batch["labels"], batch["loss_mask"], batch["advantages"], old)
        assert_close(own, -objective.mean(), batch["logits"])


@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
def test_the_penalties_are_trls(how):
    """beta * (exp(ref - logp) - (ref - logp) - 1) per token (GRPO eq. 4), and an entropy bonus."""
    for seed in SEEDS:
        batch = draw(seed)
        arguments = [batch[name] for name in ("logits", "labels", "loss_mask", "advantages", "old_log_probs")]
        difference = batch["ref_log_probs"][:, 1:] - token_logps(batch["logits"], batch["labels"])
        distribution = torch.distributions.Categorical(logits=batch["logits"][:, :-1])
        penalties = 0.3 * (difference.exp() - difference - 1) - 0.1 * distribution.entropy()
        expected = verl_policy_loss(*arguments, low=0.2, high=0.2, dual=None, how=how)
        expected = expected + aggregate(penalties, batch["loss_mask"][:, 1:], how)
        options = {"kl_coef": 0.3, "entropy_coef": 0.1, "ref_log_probs": batch["ref_log_probs"]}
        assert_close(ppo_loss(*arguments, aggregation=how, **options), expected, batch["logits"])


def test_grpo_loss_is_the_documented_formula():
    """-mean_b A_b mean_t log p; with a fraction in the mask a token counts in part."""
    for seed in SEEDS:
        batch = draw(seed)
        for factor in (1.0, 0.5):
            mask = batch["loss_mask"] * torch.where(torch.arange(T) % 2 == 0, factor, 1.0)
            logp = token_logps(batch["logits"], batch["labels"]) * mask[:, 1:]
            expected = -(logp.sum(1) / mask[:, 1:].sum(1).clamp(min=1) * batch["advantages"]).mean()
            assert_close(grpo_loss(batch["logits"], batch["labels"], mask, batch["advantages"]), expected, batch["logits"])


def test_at_a_ratio_of_1_ppo_and_grpo_have_the_same_gradient():
    batch = draw(0)
    old = torch.zeros(B, T)
    old[:, 1:] = token_logps(batch["logits"], batch["labels"]).detach()
    arguments = batch["logits"], batch["labels"], batch["loss_mask"], batch["advantages"]
    ppo = ppo_loss(*arguments, old, aggregation="sequence")
    assert torch.allclose(gradient(ppo, batch["logits"]), gradient(grpo_loss(*arguments), batch["logits"]), atol=1e-6)


def test_sft_loss_is_the_loss_of_a_hugging_face_model():
    model = tiny_model()
    ids = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :3], labels[1, 7:] = -100, -100
    output = model(input_ids=ids, labels=labels)
    own = sft_loss(output.logits, labels, torch.ones(3, 9))
    assert abs(float((own - output.loss).detach())) < 1e-6
    masked = sft_loss(output.logits, ids, (labels != -100).float())
    assert torch.equal(own, masked)


FUNCTIONS = {
    "sft": lambda b, logits: sft_loss(logits, b["labels"], b["loss_mask"]),
    "grpo": lambda b, logits: grpo_loss(logits, b["labels"], b["loss_mask"], b["token_advantages"]),
    "ppo": lambda b, logits: ppo_loss(
        logits,
        b["labels"],
        b["loss_mask"],
        b["advantages"],
        b["old_log_probs"],
        ref_log_probs=b["ref_log_probs"],
        kl_coef=0.3,
        entropy_coef=0.1,
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_finite_differences_in_float64(name):
    batch, step = draw(3, torch.float64), 1e-6
    logits = batch["logits"].detach().clone()
    exact = gradient(FUNCTIONS[name](batch, batch["logits"]), batch["logits"]).reshape(-1)
    flat = logits.reshape(-1)
    for index in range(0, len(flat), 5):
        values = []
        for sign in (1, -1):
            flat[index] += sign * step
            values.append(FUNCTIONS[name](batch, logits).item())
            flat[index] -= sign * step
        assert abs((values[0] - values[1]) / (2 * step) - float(exact[index])) < 1e-4


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_padding_does_not_change_a_loss(name, padding):
    batch = draw(4)
    whole = FUNCTIONS[name](batch, batch["logits"])
    padded = {key: value for key, value in batch.items() if key in ("advantages", "lengths")}
    for key in ("labels", "loss_mask", "token_advantages", "old_log_probs", "ref_log_probs"):
        padded[key] = torch.nn.functional.pad(batch[key], (0, padding), value=0)
    logits = torch.nn.functional.pad(batch["logits"], (0, 0, 0, padding), value=9.0)
    assert abs(float((FUNCTIONS[name](padded, logits) - whole).detach())) < 1e-6


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_loss_does_not_depend_on_the_split_or_the_packing(aggregation, packed):
    batch = draw(5)
    arguments = [batch[name] for name in ("logits", "labels", "loss_mask", "advantages", "old_log_probs")]
    whole = ppo_loss(*arguments, aggregation=aggregation, entropy_coef=0.1)
    ends = np.concatenate([[0], batch["lengths"].cumsum(0).numpy()])
    columns = {
        name: np.concatenate([batch[name][row, : batch["lengths"][row]].numpy() for row in range(B)])
        for name in ("labels", "loss_mask", "old_log_probs")
    }
    mask = columns["loss_mask"].astype(np.uint8)
    table = _core.SampleTable.from_columns(
        columns["labels"], mask, ends, batch["advantages"].numpy(), columns["old_log_probs"].astype(np.float32)
    )
    loss, parts = PPOLoss(aggregation=aggregation, entropy_coef=0.1), []
    totals = BatchTotals.from_columns(table.weights, table.target_counts)
    for rows in ([0], [2, 1]):
        tensors = to_tensors(table.collate_padding_free(rows) if packed else table.collate(rows, 0), "cpu")
        longest = tensors["input_ids"].shape[1]
        pieces = [batch["logits"][row, : batch["lengths"][row]] for row in rows]
        logits = torch.cat(pieces)[None] if packed else torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)
        assert logits.shape[1] == longest
        shared = SharedContext(logits, tensors, totals=totals, with_entropy=True)
        parts.append(scaled_loss(loss, logits, tensors, shared)[0])
    assert_close(sum(parts), whole, batch["logits"])


def test_metrics_are_returned_on_request():
    batch = draw(6)
    arguments = [batch[name] for name in ("logits", "labels", "loss_mask", "advantages", "old_log_probs")]
    loss, metrics = ppo_loss(*arguments, entropy_coef=0.1, return_metrics=True)
    assert {"loss", "ratio_mean", "clip_frac", "kl_actor_policy", "entropy"} <= metrics.keys()
    assert torch.equal(metrics["loss"], loss.detach())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": torch.zeros(B + 1)}, r"advantages \(4,\) must have the shape \(3,\)"),
        ({"loss_mask": torch.zeros(B, T - 1)}, r"loss_mask \(3, 6\) .*\(3, 7\)"),
        ({"old_log_probs": torch.zeros(B, T + 1)}, r"old_log_probs \(3, 8\) must have the shape"),
        ({"old_log_probs": torch.zeros(B), "advantages": torch.zeros(B, T)}, r"the advantages must be \[B\] too"),
        ({"kl_coef": 0.1}, "kl_coef needs ref_log_probs"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    batch = draw(0)
    arguments = {name: batch[name] for name in ("logits", "labels", "loss_mask", "advantages", "old_log_probs")}
    with pytest.raises(DataError, match=message):
        ppo_loss(**{**arguments, **changes})


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"dual_clip \(1.1\) .*clip_high \(1.2\)"):
        PPOLoss(dual_clip=1.1)
    with pytest.raises(ConfigError, match="must be one of token, sequence, constant"):
        PPOLoss(aggregation="mean")


def test_group_advantages_are_relative_to_the_group_wherever_its_members_are():
    assert compute_group_advantages([1, 5, 0, 3], ["a", "b", "a", "b"]) == [0.5, 1.0, -0.5, -1.0]
    # group a: mean 0.5, standard deviation 0.5; group b: mean 4, standard deviation 1
    normalized = compute_group_advantages([1, 5, 0, 3], ["a", "b", "a", "b"], normalize_std=True)
    assert np.allclose(normalized, [1, 1, -1, -1])
    assert compute_group_advantages([2, 2], [0, 0], normalize_std=True) == [0.0, 0.0]
    with pytest.raises(DataError, match="2 rewards and 1 group indices"):
        compute_group_advantages([1, 2], [0])


def test_losses_are_those_that_trl_and_verl_computed():
    """`loss_peers.json` has what the code of TRL 1.16.0 and verl 0.9.1 computed on two batches:
    `python -m benches.python.loss_peers --record`."""
    recorded = json.loads((Path(__file__).parent / "loss_peers.json").read_text())
    own = {}
    for number, case in enumerate(loss_peers.all_cases()):
        for seed in range(2):
            parts = loss_peers.value_and_gradient(loss_peers.compute_own, case, loss_peers.draw_batch(seed))
            for peer in loss_peers.PEERS:
                scale = loss_peers.rows_of_peer(case, peer)
                own |= {f"{peer} {number} {seed} {part}": value * scale for part, value in parts.items()}
    own = loss_peers.digest(own)
    assert len(recorded) > 200
    assert recorded.keys() <= own.keys()
    assert {name: own[name] for name in recorded} == pytest.approx(recorded, rel=1e-6, abs=1e-6)
