"""Log-probabilities and entropy against torch's own, their gradients, and the memory they take."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ludic.errors import DataError
from ludic.training.loss import compute_logp_action, compute_token_entropy, compute_token_logp, functional, selective_log_softmax
from ludic.training.loss.functional import LogitsUse


def test_selective_log_softmax_is_log_softmax_at_the_index_whatever_the_chunk(monkeypatch):
    logits = torch.randn(5, 7, 13)
    index = torch.randint(0, 13, (5, 7))
    expected = torch.log_softmax(logits, dim=-1).gather(2, index[..., None]).squeeze(2)
    for elements in (1, 13, 40, 1 << 20):
        monkeypatch.setattr(functional, "CHUNK_ELEMENTS", elements)
        torch.testing.assert_close(selective_log_softmax(logits, index), expected, rtol=0, atol=1e-6)


def test_gradients_equal_finite_differences(monkeypatch):
    monkeypatch.setattr(functional, "CHUNK_ELEMENTS", 20)  # several chunks, the last one smaller
    logits = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 6, (2, 4))
    assert torch.autograd.gradcheck(lambda x: compute_token_logp(x, ids), (logits,))
    assert torch.autograd.gradcheck(compute_token_entropy, (logits,))


def test_logits_at_t_score_the_token_at_t_plus_1():
    # Vocabulary 2. Position 0 gives token 1 the odds e : 1, position 1 gives token 0 the odds 1 : 1.
    logits = torch.tensor([[[0.0, 1.0], [0.0, 0.0], [9.0, -9.0]]])
    ids = torch.tensor([[0, 1, 0]])
    # log(e / (1 + e)) = -0.313262; log(1/2) = -0.693147. The last position scores nothing.
    torch.testing.assert_close(compute_token_logp(logits, ids), torch.tensor([[-0.313262, -0.693147]]), rtol=0, atol=1e-6)


def test_logp_of_an_action_is_the_masked_sum_or_mean():
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


class PeakBytes(TorchDispatchMode):
    """The largest number of bytes that tensors made inside it held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        import weakref

        out = func(*args, **(kwargs or {}))
        known = {
            t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        for tensor in torch.utils._pytree.tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self.held or key in known:
                continue
            self.held[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.release, key)
        return out

    def release(self, key):
        self.now -= self.held.pop(key, 0)


def loss_peak(function, shape=(8, 64, 512)):
    """Bytes that forward and backward of a loss take beside the logits, over the bytes of the logits."""
    hidden = torch.randn(*shape, requires_grad=True)
    ids = torch.randint(0, shape[-1], shape[:2])
    logits = hidden * 1.0  # not a leaf, as a model's output is
    with PeakBytes() as peak:
        function(logits, ids).sum().backward()
    assert hidden.grad is not None
    return peak.peak / (logits.numel() * 4), hidden.grad


def naive(logits, ids):
    return torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)


def test_log_probabilities_take_no_copy_of_the_logits(monkeypatch):
    monkeypatch.setattr(functional, "CHUNK_ELEMENTS", 1 << 12)
    torch.manual_seed(0)
    before, _ = loss_peak(naive)
    kept, gradient = loss_peak(compute_token_logp)
    consumed, in_place = loss_peak(lambda x, ids: compute_token_logp(x, ids, use=LogitsUse(consume=True)))
    assert before > 2.5, "the naive loss holds the log-softmax, its gradient and that of the slice at once"
    # One tensor of the logits' size is their gradient; `hidden` has one more, made by the multiplication that stands for the model.
    assert kept - consumed == pytest.approx(1.0, abs=0.1)
    assert consumed <= 1.3
    assert torch.isfinite(gradient).all()
    assert torch.isfinite(in_place).all()


def test_consuming_the_logits_gives_the_same_gradient_to_the_bit():
    torch.manual_seed(0)
    hidden, ids = torch.randn(3, 5, 17), torch.randint(0, 17, (3, 5))
    gradients = []
    for consume in (False, True):
        weight = torch.eye(17, requires_grad=True)
        compute_token_logp(hidden @ weight, ids, use=LogitsUse(consume=consume)).sum().backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)


def test_consumed_logits_that_somebody_else_still_needs_are_an_error_not_a_wrong_gradient():
    hidden = torch.randn(2, 3, 5, requires_grad=True)
    logits = torch.tanh(hidden)  # the backward pass of tanh needs its output
    logp = compute_token_logp(logits, torch.zeros(2, 3, dtype=torch.long), use=LogitsUse(consume=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()


def test_two_readers_of_the_logits_keep_them():
    hidden = torch.randn(2, 3, 5, requires_grad=True)
    ids, use = torch.zeros(2, 3, dtype=torch.long), LogitsUse(consume=True)
    logits = hidden * 1.0
    (compute_token_logp(logits, ids, use=use).sum() + compute_token_entropy(logits, use=use).sum()).backward()
    got = hidden.grad.clone()
    hidden.grad = None
    logits = hidden * 1.0
    (compute_token_logp(logits, ids).sum() + compute_token_entropy(logits).sum()).backward()
    torch.testing.assert_close(got, hidden.grad)
