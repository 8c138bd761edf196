"""A loss over pairs of samples, of which each micro-batch has only some."""

import torch

from ludic.training.loss import Loss, SharedContext


def pool(batch):
    """[B, D] sum of the hidden states at the tokens before each action token."""
    shared = SharedContext(batch["input_ids"], batch)
    columns = [shared.by_sample(column) for column in batch["hidden"][:, :-1].unbind(dim=-1)]
    return (torch.stack(columns, dim=-1) * shared.token_mask[..., None]).sum(dim=1)


class PairLoss(Loss):
    """sum over pairs i, j of different labels of tanh(h_i . h_j), divided by the number of
    samples."""

    scales_itself = True
    reads_hidden = True
    needs_first_pass = True
    gathers = ("pooled", "label")

    def first_pass(self, logits, batch):
        return {"pooled": pool(batch), "label": batch["label"], "count": batch["label"].sum() * 0.0 + 1.0}

    def compute(self, logits, batch, *, shared=None):
        pooled = pool(batch)
        measured = {} if shared is None else shared.totals.measured
        if "pooled" not in measured:
            value = whole(pooled, batch["label"])
            return value, {"loss": value.detach()}
        everyone = measured["pooled"].detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(whole(everyone, measured["label"]), everyone)
        value = (gradient[batch["position"]] * pooled).sum()
        return value, {"loss": value.detach()}


def whole(pooled, labels):
    differ = labels[:, None] != labels[None, :]
    return (torch.tanh(0.01 * pooled @ pooled.T) * differ).sum() / len(labels)
