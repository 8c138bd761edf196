"""Log-probabilities and entropy compared with torch's, their gradients and their memory."""

import math

import pytest
import torch
from benches.python import loss_memory
from hypothesis import given, strategies as st
from loss_batches import Bigram, padded, rows

from ludic.errors import DataError
from ludic.training.algorithm import RLAlgorithm
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import (
    BatchTotals,
    CISPOLoss,
    CompositeLoss,
    EntropyBonus,
    LossTerm,
    SharedContext,
    compute_logp_action,
    compute_token_entropy,
    compute_token_logp,
    compute_token_logp_and_entropy,
    logprobs,
    selective_log_softmax,
)
from ludic.training.loss.logprobs import LogitsUse, capped_exp


def test_selective_log_softmax_equals_log_softmax_at_the_index_for_every_chunk_size(monkeypatch):
    logits = torch.randn(5, 7, 13)
    index = torch.randint(0, 13, (5, 7))
    expected = torch.log_softmax(logits, dim=-1).gather(2, index[..., None]).squeeze(2)
    for elements in (1, 13, 40, 1 << 20):
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
        torch.testing.assert_close(selective_log_softmax(logits, index), expected, rtol=0, atol=1e-6)


def test_gradients_equal_finite_differences(monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 20)  # several chunks, the last one smaller
    logits = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 6, (2, 4))
    assert torch.autograd.gradcheck(lambda x: compute_token_logp(x, ids), (logits,))
    assert torch.autograd.gradcheck(compute_token_entropy, (logits,))


def test_logits_at_t_score_the_token_at_t_plus_1():
    # Vocabulary 2. Position 0 gives token 1 the odds e : 1, position 1 gives token 0 the odds 1 :
    # 1.
    logits = torch.tensor([[[0.0, 1.0], [0.0, 0.0], [9.0, -9.0]]])
    ids = torch.tensor([[0, 1, 0]])
    # log(e / (1 + e)) = -0.313262; log(1/2) = -0.693147. The last position has no next token.
    torch.testing.assert_close(compute_token_logp(logits, ids), torch.tensor([[-0.313262, -0.693147]]), rtol=0, atol=1e-6)


def test_the_logp_of_an_action_is_the_masked_sum_or_mean():
    logits = torch.tensor([[[0.0, 1.0], [0.0, 0.0], [9.0, -9.0]]])
    ids = torch.tensor([[0, 1, 0]])
    mask = torch.tensor([[0.0, 1.0, 1.0]])
    # -0.313262 - 0.693147 = -1.006409; half of it -0.503204.
    torch.testing.assert_close(compute_logp_action(logits, ids, mask), torch.tensor([-1.006409]), rtol=0, atol=1e-6)
    normalised = compute_logp_action(logits, ids, mask, length_normalize=True)
    torch.testing.assert_close(normalised, torch.tensor([-0.503204]), rtol=0, atol=1e-6)


def test_entropy_of_a_uniform_distribution_is_the_log_of_its_size():
    torch.testing.assert_close(compute_token_entropy(torch.zeros(1, 3, 8)), torch.full((1, 2), 2.0794415))  # ln 8


def test_wrong_shapes_are_named():
    with pytest.raises(DataError, match=r"\[B, T, V\]"):
        compute_token_logp(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(DataError, match="first two axes"):
        compute_token_logp(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(DataError, match="at least 2"):
        compute_token_logp(torch.zeros(2, 1, 5), torch.zeros(2, 1, dtype=torch.long))


@given(st.sampled_from([torch.float16, torch.bfloat16]), st.integers(0, 1000))
def test_half_precision_logits_are_reduced_in_float32(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(2, 3, 50, generator=generator) * 5).to(dtype)
    ids = torch.randint(0, 50, (2, 3), generator=generator)
    expected = compute_token_logp(logits.float(), ids)
    torch.testing.assert_close(compute_token_logp(logits, ids), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("read", [loss_memory.logp_over_logits, loss_memory.entropy_over_logits, loss_memory.both_over_logits])
def test_the_loss_needs_at_most_a_third_of_the_memory_of_the_logits(read, dtype):
    # 2^21 logits in chunks of 2^17: a sixteenth of the logits at a time, an eighth for
    # half-precision logits in float32.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "CHUNK_ELEMENTS", 1 << 17)
        forward, both = loss_memory.peak_ratios(read, dtype, (4, 64, 8192))
    assert forward <= 1.3
    assert both <= 1.3


def test_keeping_the_logits_costs_one_copy_and_log_softmax_two_more(monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 1 << 17)
    shape = (4, 64, 8192)
    assert loss_memory.peak_ratios(logprobs.compute_token_logp, torch.float32, shape)[1] == pytest.approx(2.0, abs=0.15)
    # Logits, log-softmax, gradient of the gather, gradient of the slice: 4.
    assert loss_memory.peak_ratios(loss_memory.log_softmax_and_gather, torch.float32, shape)[1] == pytest.approx(4.0, abs=0.15)


def test_an_algorithm_overwrites_the_logits_with_the_gradient_unless_its_loss_reads_them(monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 1 << 12)
    made = []

    class Remembering(Bigram):
        def forward(self, *args, **kwargs):
            made.append(super().forward(*args, **kwargs))
            return made[-1]

    def logits_survive(loss):
        model = Remembering()
        value, _ = RLAlgorithm("test", ConstantCredit(), loss).compute_loss(model, padded(rows(3, seed=1)))
        before = made[-1].detach().clone()
        value.backward()
        return torch.equal(before, made[-1])

    class ReadsLogits(CISPOLoss):
        reads_shared_only = False

    assert not logits_survive(CISPOLoss())
    assert logits_survive(ReadsLogits())
    assert logits_survive(CompositeLoss([LossTerm("pg", CISPOLoss()), LossTerm("own", ReadsLogits())]))


def test_consuming_the_logits_gives_a_bitwise_equal_gradient():
    torch.manual_seed(0)
    hidden, ids = torch.randn(3, 5, 17), torch.randint(0, 17, (3, 5))
    gradients = []
    for consume in (False, True):
        weight = torch.eye(17, requires_grad=True)
        compute_token_logp(hidden @ weight, ids, use=LogitsUse(consume=consume)).sum().backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)


def gradients_of_input(make_logits, consume):
    hidden = torch.linspace(-2, 2, 30).view(2, 3, 5).clone().requires_grad_()
    ids = torch.tensor([[0, 1, 2], [3, 4, 0]])
    compute_token_logp(make_logits(hidden), ids, use=LogitsUse(consume=consume)).sum().backward()
    return hidden.grad


@pytest.mark.parametrize(
    "make_logits", [torch.tanh, lambda h: torch.tanh(h.view(6, 5)).view(2, 3, 5), lambda h: h, lambda h: h.view(2, 3, 5)]
)
def test_logits_that_a_backward_pass_or_a_parameter_needs_are_not_overwritten(make_logits):
    # The backward pass of tanh needs its output. A model may also return a parameter or a view of
    # one.
    assert torch.equal(gradients_of_input(make_logits, True), gradients_of_input(make_logits, False))
    parameter = torch.randn(2, 3, 5, requires_grad=True)
    before = parameter.detach().clone()
    compute_token_logp(make_logits(parameter), torch.zeros(2, 3, dtype=torch.long), use=LogitsUse(consume=True)).sum().backward()
    assert torch.equal(parameter.detach(), before)


def test_consuming_logits_that_another_operation_needs_is_an_error_and_no_wrong_gradient():
    hidden = torch.randn(2, 3, 5, requires_grad=True)
    logits = hidden * 1.0
    squared = (logits**2).sum()  # its backward pass needs the logits and runs later
    later = squared * hidden.sum()
    logp = compute_token_logp(logits, torch.zeros(2, 3, dtype=torch.long), use=LogitsUse(consume=True))
    logp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.backward()


def test_second_derivatives_are_refused():
    logits = torch.randn(1, 3, 4, requires_grad=True)
    (first,) = torch.autograd.grad(
        compute_token_logp(logits, torch.zeros(1, 3, dtype=torch.long)).pow(2).sum(), logits, create_graph=True
    )
    with pytest.raises(RuntimeError):
        first.pow(2).sum().backward()


@given(st.integers(0, 1000), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_joint_function_equals_the_two_separate_ones(seed, consume, dtype):
    generator = torch.Generator().manual_seed(seed)
    leaf = (torch.randn(2, 4, 9, generator=generator) * 3).to(dtype).requires_grad_()
    ids = torch.randint(0, 9, (2, 4), generator=generator)
    scale = torch.randn(2, 2, 3, generator=generator)
    alone = compute_token_logp(leaf, ids), compute_token_entropy(leaf)
    (wanted,) = torch.autograd.grad((torch.stack(alone) * scale).sum(), leaf)
    both = compute_token_logp_and_entropy(leaf * 1, ids, use=LogitsUse(consume=consume))
    assert torch.equal(torch.stack(both), torch.stack(alone))
    (got,) = torch.autograd.grad((torch.stack(both) * scale).sum(), leaf)
    torch.testing.assert_close(
        got, wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-2 if dtype == torch.bfloat16 else 1e-6
    )


@pytest.mark.parametrize("wanted", [0, 1])
def test_one_result_of_the_joint_function_can_be_used_alone(wanted):
    leaf = torch.randn(1, 3, 5, requires_grad=True)
    ids = torch.tensor([[0, 1, 2]])
    compute_token_logp_and_entropy(leaf * 1, ids, use=LogitsUse(consume=True))[wanted].sum().backward()
    (alone,) = torch.autograd.grad([compute_token_logp(leaf, ids), compute_token_entropy(leaf)][wanted].sum(), leaf)
    torch.testing.assert_close(leaf.grad, alone)


def test_a_composite_with_an_entropy_bonus_reads_the_logits_once(monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 1 << 17)
    loss = CompositeLoss([LossTerm("pg", CISPOLoss()), LossTerm("entropy", EntropyBonus())])

    def composite(logits, ids):
        rows, tokens = ids.shape
        batch = {"input_ids": ids, "action_mask": torch.ones(rows, tokens), "weight": torch.ones(rows)}
        batch |= {"attention_mask": torch.ones_like(ids), "actor_logps": torch.zeros(rows, tokens)}
        shared = SharedContext(logits, batch, consume_logits=loss.reads_shared_only, with_entropy=loss.reads_entropy)
        return loss.compute(logits, batch, shared=shared)[0]

    assert loss_memory.peak_ratios(composite, torch.float32, (4, 64, 8192))[1] <= 1.3


def test_two_terms_that_read_the_logits_do_not_overwrite_them():
    hidden = torch.randn(2, 3, 5, requires_grad=True)
    ids, use = torch.zeros(2, 3, dtype=torch.long), LogitsUse(consume=True)
    logits = hidden * 1.0
    (compute_token_logp(logits, ids, use=use).sum() + compute_token_entropy(logits, use=use).sum()).backward()
    got = hidden.grad.clone()
    hidden.grad = None
    logits = hidden * 1.0
    (compute_token_logp(logits, ids).sum() + compute_token_entropy(logits).sum()).backward()
    torch.testing.assert_close(got, hidden.grad)


def test_the_gradient_of_a_likely_token_does_not_vanish_in_half_precision():
    # Odds e^7 : 1, so 1 - p = 1 / (1 + e^7) = 0.000911051: subtracting p from 1 in bfloat16 would
    # give 0.
    logits = torch.tensor([[[0.0, 7.0], [0.0, 0.0]]], dtype=torch.bfloat16, requires_grad=True)
    compute_token_logp(logits, torch.tensor([[0, 1]])).sum().backward()
    assert logits.grad[0, 0].tolist() == pytest.approx([-0.000911051, 0.000911051], rel=1e-2)


@given(st.integers(0, 1000))
def test_half_precision_gradients_are_float32_gradients_rounded_once(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(2, 3, 20, generator=generator) * 5).bfloat16()
    ids = torch.randint(0, 20, (2, 3), generator=generator)
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        leaf = logits.detach().to(dtype, copy=True).requires_grad_()
        compute_token_logp(leaf, ids).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1].bfloat16(), rtol=0, atol=0)


def test_entropy_with_impossible_tokens_and_its_gradient_are_finite():
    logits = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]]], requires_grad=True)
    entropy = compute_token_entropy(logits)
    entropy.sum().backward()
    assert entropy.tolist() == [[pytest.approx(math.log(2.0))]]
    assert logits.grad.abs().max() < 1e-7  # the maximum over two tokens; the third is impossible


def test_a_capped_ratio_never_overflows_and_has_no_gradient_at_the_cap():
    log_ratio = torch.tensor([-3.0, 0.0, 0.5, 1.0, 500.0], requires_grad=True)
    ratio = capped_exp(log_ratio, 2.0)
    ratio.sum().backward()
    # e^-3 = 0.0497871, e^0.5 = 1.6487213; e^1 and e^500 are capped at exactly 2.
    assert ratio.tolist() == pytest.approx([0.0497871, 1.0, 1.6487213, 2.0, 2.0], abs=1e-6)
    assert log_ratio.grad.tolist() == pytest.approx([0.0497871, 1.0, 1.6487213, 0.0, 0.0], abs=1e-6)
    assert ratio[3:].tolist() == [2.0, 2.0]
    assert capped_exp(torch.tensor(500.0), None).item() == math.inf


def test_token_counts_include_only_predicted_tokens():
    # Row lengths and actions: the first token of a row is not predicted, so a mask that starts
    # there counts one less.
    logits = torch.zeros(1, 3, 4)
    batch = {"input_ids": torch.zeros(1, 3, dtype=torch.long), "action_mask": torch.ones(1, 3), "weight": torch.ones(1)}
    totals = BatchTotals(num_samples=4, num_tokens=8, weight_mean=0.0, weight_std=0.0, num_pairs=2)
    shared = SharedContext(logits, batch, totals=totals)
    assert (
        float(shared.mini_batch_share("samples")),
        float(shared.mini_batch_share("tokens")),
        float(shared.mini_batch_share("pairs")),
    ) == (0.25, 0.25, 0.25)
    assert SharedContext(logits, batch).mini_batch_share("tokens") == 1.0
