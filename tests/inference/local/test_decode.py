"""Decoding of token ids: many architectures, prompts of unequal lengths, and the state of the model
afterwards."""

from types import SimpleNamespace

import pytest
import torch
from decoding import KINDS, assert_trainable, make_model
from hypothesis import given, settings, strategies as st
from playing import tiny_model

from ludic.inference import SamplingParams
from ludic.inference.local.decode import DecodeRequest, decode


def jobs_for(prompts, **sampling):
    return [
        DecodeRequest(prompt, SamplingParams(**{"temperature": 1.0, **sampling}), limit=1 + (5 * i) % 9, seed=i)
        for i, prompt in enumerate(prompts)
    ]


def run(model, jobs, eos_ids=frozenset()):
    return decode(model, jobs, eos_ids=eos_ids, pad_id=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_unequal_prompts_gives_the_same_tokens_as_single_requests(kind):
    model = make_model(kind)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 99, (length,), generator=generator).tolist() for length in (1, 3, 7, 7, 12, 2)]
    jobs = jobs_for(prompts)
    together = run(model, jobs)
    assert [len(c.token_ids) for c in together] == [
        job.limit for job in jobs
    ]  # lengths 1, 6, 2, 7, 3, 8: rows leave the batch one after another
    assert [c.token_ids for c in together] == [run(model, [job])[0].token_ids for job in jobs]
    assert_trainable(model, jobs, together)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prompt_is_prefilled_once_and_each_request_gets_its_own_tokens(kind):
    model = make_model(kind)
    first, second = [5, 6, 7], [8, 9, 10, 11]
    jobs = jobs_for([first, second, first, first, second, first])
    read = []
    handle = model.get_input_embeddings().register_forward_hook(lambda _, ids, __: read.append(tuple(ids[0].shape)))
    together = run(model, jobs)
    handle.remove()
    assert read[0] == (2, 4)  # two prompts for six requests, padded to the longer one
    assert [c.token_ids for c in together] == [run(model, [job])[0].token_ids for job in jobs]
    assert len({tuple(c.token_ids) for c in together}) == 6
    assert_trainable(model, jobs, together)


QWEN = tiny_model()
PROMPTS = st.lists(st.lists(st.integers(3, 258), min_size=1, max_size=12), min_size=1, max_size=6)


@settings(max_examples=25)
@given(PROMPTS, st.sampled_from([0.0, 0.7, 1.0, 1.5]), st.sampled_from([0.3, 0.9, 1.0]), st.sampled_from([0.0, 0.5]))
def test_the_tokens_of_a_request_do_not_depend_on_its_batch(prompts, temperature, top_p, penalty):
    jobs = jobs_for(prompts, temperature=temperature, top_p=top_p, frequency_penalty=penalty, presence_penalty=-penalty)
    together = run(QWEN, jobs, frozenset({2}))
    assert [c.token_ids for c in together] == [run(QWEN, [job], frozenset({2}))[0].token_ids for job in jobs]
    assert_trainable(QWEN, jobs, together)


def test_sampling_settings_of_one_row_do_not_affect_other_rows():
    """Unrestricted rows beside top-k rows, and sampled rows beside greedy rows."""
    plain = DecodeRequest([5, 6], SamplingParams(temperature=1.0), limit=9, seed=4)
    neighbours = [
        DecodeRequest([7], SamplingParams(temperature=1.0, top_p=0.5), limit=9, seed=4),
        DecodeRequest([8], SamplingParams(temperature=0.0), limit=9),
        DecodeRequest([9], SamplingParams(temperature=1.0, presence_penalty=2.0), limit=9, seed=4),
    ]
    beside = run(QWEN, [plain, *neighbours])[0]
    assert beside.token_ids == run(QWEN, [plain])[0].token_ids
    assert beside.drawn_logprobs == pytest.approx(beside.logprobs, abs=1e-5)


class Bare(torch.nn.Module):
    """Supports neither cache nor mask nor positions: the next token is always the last one plus
    1."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(50.0))
        self.lengths = []

    def forward(self, input_ids):
        self.lengths.append(input_ids.shape[1])
        return SimpleNamespace(logits=self.scale * torch.nn.functional.one_hot((input_ids + 1) % 10, 10).float())


def test_a_model_without_a_cache_reads_the_whole_row_at_every_step():
    model = Bare()
    jobs = [
        DecodeRequest([1, 2], SamplingParams(temperature=1.0), 3, 0),
        DecodeRequest([4], SamplingParams(temperature=1.0), 4, 0),
    ]
    assert [c.token_ids for c in run(model, jobs)] == [[3, 4, 5], [5, 6, 7, 8]]
    assert model.lengths == [2, 3, 4, 5]


def test_an_end_token_ends_only_its_row():
    jobs = [DecodeRequest([1], SamplingParams(temperature=0.0), 8), DecodeRequest([5], SamplingParams(temperature=0.0), 8)]
    got = run(Bare(), jobs, frozenset({7}))
    assert [(c.token_ids, c.finish_reason) for c in got] == [([2, 3, 4, 5, 6, 7], "stop"), ([6, 7], "stop")]


def test_an_end_token_at_the_limit_counts_as_stop():
    job = DecodeRequest([1], SamplingParams(temperature=0.0), 3, contains_stop=lambda ids: ids[-2:] == [3, 4])
    got = run(Bare(), [job])[0]
    assert (got.token_ids, got.finish_reason) == ([2, 3, 4], "stop")
    job = DecodeRequest([1], SamplingParams(temperature=0.0), 3, contains_stop=lambda ids: ids[-1] == 5)
    assert run(Bare(), [job])[0].finish_reason == "length"


def test_a_cancelled_row_is_removed_from_the_batch():
    model = Bare()
    asked = iter([False, True])
    jobs = [
        DecodeRequest([1], SamplingParams(temperature=0.0), 9, is_abandoned=lambda: next(asked)),
        DecodeRequest([4], SamplingParams(temperature=0.0), 3),
    ]
    assert run(model, jobs)[1].token_ids == [5, 6, 7]
    assert len(model.lengths) == 3


def test_the_mode_of_each_module_is_restored_and_the_model_can_be_trained():
    model = tiny_model().train()
    model.model.layers[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    seen = []
    model.lm_head.register_forward_hook(lambda *_: seen.append((model.training, torch.is_grad_enabled())))
    assert torch.is_grad_enabled()
    run(model, jobs_for([[5, 6], [7]]))
    assert set(seen) == {(False, False)}
    assert torch.is_grad_enabled()
    assert {name: module.training for name, module in model.named_modules()} == before
    model(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]])).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_mode_is_restored_after_a_failure():
    model = tiny_model().train()
    model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model, jobs_for([[5]]))
    assert model.training
    assert torch.is_grad_enabled()


def test_a_bfloat16_model_gives_the_log_probabilities_of_its_forward_pass():
    model = tiny_model().to(torch.bfloat16)
    job = DecodeRequest([5, 6, 7], SamplingParams(temperature=1.0), 8, 0)
    got = run(model, [job])[0]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([job.prompt_ids + got.token_ids])).logits[0].float()
    expected = torch.log_softmax(logits, -1)[2:-1].gather(1, torch.tensor(got.token_ids)[:, None]).squeeze(1).tolist()
    assert got.logprobs == pytest.approx(expected, abs=0.15)  # 8 mantissa bits for logits of about 10
