"""The value loss of PPO, compared with verl's formulas, by hand and in every layout."""

import pytest
import torch
from hypothesis import given, strategies as st

from ludic.errors import ConfigError
from ludic.training import BatchTotals, SharedContext, ValueLoss
from ludic.training.loss import scaled_loss

numbers = st.integers(-64, 64).map(lambda number: number / 16)
rows = st.lists(st.tuples(numbers, numbers, numbers, st.booleans()), min_size=1, max_size=6)


def padded(samples):
    """A batch of rows whose token t + 1 has (value, old value, return, is an action), and the
    critic's outputs."""
    width = max(map(len, samples)) + 1
    columns = torch.zeros(4, len(samples), width)
    for row, tokens in enumerate(samples):
        for column in range(4):
            columns[column, row, 1 : len(tokens) + 1] = torch.tensor([float(token[column]) for token in tokens])
    outputs = torch.roll(columns[0], -1, dims=1)[..., None].requires_grad_()  # the value before token t + 1 is at t
    ids = torch.ones(len(samples), width, dtype=torch.long)
    return outputs, {"input_ids": ids, "action_mask": columns[3].long(), "values": columns[1], "returns": columns[2]}


def value_loss_of_verl(vpreds, values, returns, response_mask, cliprange_value):
    """compute_value_loss with loss_agg_mode="token-mean": half of the masked mean of the larger
    squared error, and the share of tokens on which the clipped one is larger."""
    clipped = torch.max(torch.min(vpreds, values + cliprange_value), values - cliprange_value)
    unclipped_error, clipped_error = (vpreds - returns) ** 2, (clipped - returns) ** 2
    total = response_mask.sum()
    loss = 0.5 * (torch.max(unclipped_error, clipped_error) * response_mask).sum() / total
    return loss, ((clipped_error > unclipped_error).float() * response_mask).sum() / total


@given(st.lists(rows, min_size=1, max_size=4).filter(lambda samples: any(token[3] for row in samples for token in row)))
def test_value_and_gradient_are_those_of_verl(samples):
    outputs, batch = padded(samples)
    loss, stats = ValueLoss(value_clip=0.5).compute(outputs, batch)
    [gradient] = torch.autograd.grad(loss, outputs)
    theirs = outputs.detach()[:, :-1, 0].clone().requires_grad_()
    columns = [batch[name][:, 1:] for name in ("values", "returns", "action_mask")]
    want, clipped = value_loss_of_verl(theirs, *columns, 0.5)
    [wanted] = torch.autograd.grad(want, theirs)
    torch.testing.assert_close(loss, want)
    assert torch.isclose(stats["clipped_tokens"] / stats["tokens"], clipped)
    tied = (theirs - columns[1]).square() == (theirs.clamp(columns[0] - 0.5, columns[0] + 0.5) - columns[1]).square()
    inside = (theirs - columns[0]).abs() < 0.5
    differs = tied & ~inside  # both errors are equal at a kink: either derivative is one of the loss
    torch.testing.assert_close(gradient[:, :-1, 0][~differs], wanted[~differs])


def test_the_loss_by_hand():
    # values 1 and 3, old 0 and 3, returns 2 and 0, clip 0.5: clipped 0.5 and 3
    # max(1, 2.25) and max(9, 9); half of the mean is 2.8125; without the clip (1 + 9) / 4 = 2.5
    outputs, batch = padded([[(1.0, 0.0, 2.0, True), (3.0, 3.0, 0.0, True)]])
    loss, stats = ValueLoss(value_clip=0.5).compute(outputs, batch)
    assert (loss.item(), stats["clipped_tokens"].item(), stats["tokens"].item()) == (2.8125, 1.0, 2.0)
    assert ValueLoss(value_clip=None).compute(outputs, batch)[0].item() == 2.5
    assert ValueLoss(None, "samples").compute(outputs, batch)[0].item() == 5.0


def test_values_are_those_before_and_after_each_token_in_a_row_of_several_samples():
    # rows [a b c] and [d e]: outputs 0 .. 4; before b, c, e: 0, 1, 3; after them 1, 2, 4
    batch = {
        "input_ids": torch.arange(5)[None],
        "action_mask": torch.ones(1, 5, dtype=torch.long),
        "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
    }
    shared = SharedContext(torch.arange(5.0)[None, :, None], batch)
    assert shared.values().tolist() == [[0.0, 1.0], [3.0, 0.0]]
    assert shared.values(after=True).tolist() == [[1.0, 2.0], [4.0, 0.0]]


@given(st.lists(rows.map(lambda row: [(*token[:3], True) for token in row]), min_size=2, max_size=4), st.data())
def test_losses_of_parts_add_up_to_the_loss_of_the_batch(samples, data):
    outputs, batch = padded(samples)
    cut = data.draw(st.integers(1, len(samples) - 1))
    tokens = float(batch["action_mask"].sum())
    totals = BatchTotals(float(len(samples)), tokens, weight_mean=0.0, weight_std=0.0)
    parts = 0.0
    for part in (slice(None, cut), slice(cut, None)):
        own = {name: column[part] for name, column in batch.items()} | {"weight": torch.zeros(len(samples))[part]}
        shared = SharedContext(outputs[part], own, totals=totals)
        parts += scaled_loss(ValueLoss(), outputs[part], own, shared)[0].item()
    assert parts == pytest.approx(ValueLoss().compute(outputs, batch)[0].item(), rel=1e-5, abs=1e-6)


def test_a_clip_of_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"value_clip \(0\) must be above 0"):
        ValueLoss(value_clip=0)
