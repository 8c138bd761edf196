"""`Loss`, and how a user's loss is adapted."""

import inspect

import pytest
import torch
from loss_batches import Bigram, padded, rows

from ludic.errors import ConfigTypeError
from ludic.training import CISPOLoss, CompositeLoss, ConstantCredit, Loss, LossTerm, RLAlgorithm
from ludic.training.loss import as_loss
from ludic.training.loss.base import AdaptedLoss, adapted_loss, loss_name


class DocumentedLoss:
    """Has only the documented members."""

    normalizer = "tokens"
    zero_weight_is_zero_gradient = True

    def compute(self, logits, batch):
        loss = logits.square().mean()
        return loss, {"loss": loss.detach()}


def square(logits, batch):
    loss = logits.square().mean()
    return loss, {"loss": loss.detach()}


def test_a_loss_is_not_wrapped():
    loss = CISPOLoss()
    assert as_loss(loss) is loss
    assert RLAlgorithm("x", ConstantCredit(), loss).loss is loss
    assert LossTerm("x", loss).loss is loss


def test_an_object_with_only_the_documented_members_becomes_a_loss_with_its_flags():
    loss = adapted_loss(RLAlgorithm("x", ConstantCredit(), DocumentedLoss()))
    assert isinstance(loss, Loss)
    assert (loss.normalizer, loss.zero_weight_is_zero_gradient) == ("tokens", True)
    assert (loss.reads_shared_only, loss.reads_entropy, loss.needs_first_pass, loss.scales_itself) == (False,) * 4
    assert (loss.score_type, loss.beta) == ("reward", 1.0)
    assert as_loss(loss) is loss


class ScaledLoss(DocumentedLoss):
    """A loss with a coefficient that the user changes between steps."""

    scale = 1.0

    def compute(self, logits, batch):
        loss = self.scale * logits.square().mean()
        return loss, {"loss": loss.detach()}


def test_a_users_loss_can_be_read_changed_and_replaced_on_the_algorithm():
    own, batch = ScaledLoss(), padded(rows(3, seed=1))
    algorithm = RLAlgorithm("x", ConstantCredit(), own)
    assert algorithm.loss is own
    assert LossTerm("x", own).loss is own
    first = algorithm.compute_loss(Bigram(), batch)[0].item()
    algorithm.loss.scale = 3.0
    assert algorithm.compute_loss(Bigram(), batch)[0].item() == pytest.approx(3.0 * first)
    own.reads_entropy = True
    assert adapted_loss(algorithm).reads_entropy
    algorithm.loss = square
    assert algorithm.compute_loss(Bigram(), batch)[0].item() == pytest.approx(first)


def test_an_algorithm_that_computes_its_own_loss_needs_none():
    class Own(RLAlgorithm):
        def compute_loss(self, model, batch, **options):
            return square(model(batch["input_ids"]), batch)

    assert adapted_loss(Own("x", ConstantCredit(), None)).normalizer == "samples"


def test_a_plain_function_is_a_loss():
    batch = padded(rows(3, seed=1))
    value, stats = RLAlgorithm("x", ConstantCredit(), square).compute_loss(Bigram(), batch)
    expected, _ = RLAlgorithm("x", ConstantCredit(), DocumentedLoss()).compute_loss(Bigram(), batch)
    assert value.item() == expected.item() == stats["loss"].item() > 0
    assert loss_name(as_loss(square)) == "square"


def test_a_compute_without_a_shared_argument_is_called_without_it():
    class Own(Loss):
        reads_entropy = True

        def compute(self, logits, batch):
            return square(logits, batch)

    loss = as_loss(Own())
    assert isinstance(loss, AdaptedLoss)
    assert loss.reads_entropy
    assert loss_name(loss) == "Own"
    assert RLAlgorithm("x", ConstantCredit(), loss).compute_loss(Bigram(), padded(rows(2, seed=1)))[0] > 0


def test_a_subclass_needs_only_compute_from_and_works_without_a_context():
    class MeanLogp(Loss):
        reads_shared_only = True

        def compute_from(self, shared):
            loss = -shared.logp_action().mean()
            return loss, {"loss": loss.detach()}

    model, batch = Bigram(), padded(rows(3, seed=2))
    alone, _ = MeanLogp().compute(model(batch["input_ids"]), batch)
    within, _ = RLAlgorithm("x", ConstantCredit(), MeanLogp()).compute_loss(model, batch)
    assert alone.item() == within.item() > 0


def test_a_subclass_without_compute_and_compute_from_gets_an_error_that_names_both():
    with pytest.raises(NotImplementedError, match=r"Loss must define compute_from\(shared\) or compute\(logits, batch\)"):
        Loss().compute(torch.zeros(1, 2, 3), {})


def test_an_adapted_loss_uses_the_first_pass_of_the_object():
    class Measuring(DocumentedLoss):
        needs_first_pass = True

        def first_pass(self, logits, batch):
            return {"sum": logits.sum()}

    composite = CompositeLoss([LossTerm("a", Measuring()), LossTerm("b", CISPOLoss())])
    assert composite.needs_first_pass
    assert composite.first_pass(torch.ones(1, 2, 3), {})["sum"].item() == 6.0


@pytest.mark.parametrize("wrong", [None, 3, "grpo"])
def test_an_object_that_is_not_a_loss_is_refused_by_the_constructor(wrong):
    with pytest.raises(ConfigTypeError, match=r"loss \(\w+\) .*compute\(logits, batch\), .*function"):
        RLAlgorithm("x", ConstantCredit(), wrong)
    with pytest.raises(ConfigTypeError, match=r"loss \(\w+\) .*compute\(logits, batch\), .*function"):
        LossTerm("x", wrong)


def test_the_signature_of_a_loss_is_read_once_where_it_enters(monkeypatch):
    reads, read = [], inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda function: reads.append(function) or read(function))
    RLAlgorithm("x", ConstantCredit(), square)
    assert reads == [square]
    LossTerm("x", square)
    assert reads == [square, square]


def test_signatures_are_inspected_once_and_not_for_each_micro_batch(monkeypatch):
    algorithm = RLAlgorithm("x", ConstantCredit(), CompositeLoss([LossTerm("a", DocumentedLoss()), LossTerm("b", CISPOLoss())]))
    monkeypatch.setattr(inspect, "signature", lambda *_: pytest.fail("a signature was read again"))
    algorithm.compute_loss(Bigram(), padded(rows(2, seed=1)))
