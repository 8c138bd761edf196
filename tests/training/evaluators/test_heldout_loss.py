"""The held-out loss is the mean over the trained tokens, however they are packed."""

import math
import random

import pytest
import torch
from training_samples import cpu_config, sorting_item, tiny_model

from ludic.errors import ConfigError
from ludic.training import SAWItem, Trainer, make_sft, ranks
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.evaluators.held_out import HeldOutLoss


def items_of(count):
    draw = random.Random(3)
    return [sorting_item(i, draw, weight=1.0) for i in range(count)]


@torch.no_grad()
def mean_nll(model, items):
    """One sample at a time, with torch's cross entropy."""
    total, tokens = 0.0, 0
    for item in items:
        ids = torch.tensor([item.input_ids])
        logp = torch.log_softmax(model(ids).logits[0, :-1].double(), dim=-1)
        for row, (token, is_action) in enumerate(zip(item.input_ids[1:], item.action_mask[1:], strict=True)):
            total, tokens = total - is_action * float(logp[row, token]), tokens + is_action
    return total / tokens, tokens


def test_on_several_ranks_it_asks_no_other_rank(monkeypatch):
    def exchange(values, device):
        raise AssertionError("an exchange with ranks that do not evaluate")

    monkeypatch.setattr(ranks, "is_distributed", lambda: True)
    for name in ("sum_over_ranks", "max_over_ranks"):
        monkeypatch.setattr(ranks, name, exchange)
    model, items = tiny_model().eval(), items_of(3)
    assert HeldOutLoss(model, items, cpu_config()).measure()["tokens"] > 0


@pytest.mark.parametrize("packing", ["optimal", "greedy", "padding_free"])
def test_the_heldout_loss_is_the_mean_over_all_trained_tokens(packing):
    model, items = tiny_model().eval(), items_of(9)
    expected, tokens = mean_nll(model, items)
    measured = HeldOutLoss(model, items, cpu_config(packing=packing)).measure()
    assert measured["loss"] == pytest.approx(expected, rel=1e-5)
    assert measured["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    assert measured["tokens"] == tokens


def test_dropout_is_off_during_the_measurement_and_on_again_afterwards():
    model = tiny_model(attention_dropout=0.5).train()
    heldout = HeldOutLoss(model, items_of(4), cpu_config())
    assert heldout.measure() == heldout.measure()
    assert model.training


def test_the_trainer_logs_the_heldout_loss_and_stops_when_it_no_longer_falls():
    lines = []
    cfg = cpu_config(eval_every_n_steps=1, early_stopping_patience=2, lr=0.0)
    model = tiny_model()
    items = items_of(4)

    class Lines:
        def log(self, step, stats):
            lines.append(stats)

    source = ItemBatchSource(items, batch_size=4)
    trainer = Trainer(
        model=model, algo=make_sft(), batch_source=source, cfg=cfg, evaluator=HeldOutLoss(model, items, cfg), train_logger=Lines()
    )
    trainer.train_sync(num_steps=10)
    assert trainer.current_step == 3  # the first measurement and two that are no better
    assert all(line["eval/loss"] == lines[0].get("eval/loss", line["eval/loss"]) for line in lines if "eval/loss" in line)


def test_samples_are_truncated_as_in_training_and_an_empty_rest_is_an_error():
    model, cfg = tiny_model().eval(), cpu_config(max_seq_len=4)
    long = SAWItem([5, 6, 7, 8, 9, 10], [1] * 6, [0, 1, 1, 1, 1, 1], 1.0)
    assert HeldOutLoss(model, [long], cfg).measure()["tokens"] == 3.0
    late = SAWItem([5, 6, 7, 8, 9, 10], [1] * 6, [0, 0, 0, 0, 1, 1], 1.0)
    with pytest.raises(ConfigError, match=r"none of the 1 held-out .*max_seq_len \(4\)"):
        HeldOutLoss(model, [late], cfg)
