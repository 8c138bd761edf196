"""Decoding of token ids: models of many kinds, prompts of many lengths, and the state that a
model is left in."""

from types import SimpleNamespace

import pytest
import torch
from decoding import KINDS, assert_trainable, model_of
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
def test_a_batch_of_unequal_prompts_gives_each_what_it_gets_alone(kind):
    model = model_of(kind)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 99, (length,), generator=generator).tolist() for length in (1, 3, 7, 7, 12, 2)]
    jobs = jobs_for(prompts)
    together = run(model, jobs)
    assert [len(c.token_ids) for c in together] == [
        job.limit for job in jobs
    ]  # 1, 6, 2, 7, 3, 8: rows leave the batch one by one
    assert [c.token_ids for c in together] == [run(model, [job])[0].token_ids for job in jobs]
    assert_trainable(model, jobs, together)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_several_share_is_read_once_and_each_gets_its_own_tokens(kind):
    model = model_of(kind)
    first, second = [5, 6, 7], [8, 9, 10, 11]
    jobs = jobs_for([first, second, first, first, second, first])
    read = []
    handle = model.get_input_embeddings().register_forward_hook(lambda _, ids, __: read.append(tuple(ids[0].shape)))
    together = run(model, jobs)
    handle.remove()
    assert read[0] == (2, 4)  # two prompts, padded to the longer, for six requests
    assert [c.token_ids for c in together] == [run(model, [job])[0].token_ids for job in jobs]
    assert len({tuple(c.token_ids) for c in together}) == 6
    assert_trainable(model, jobs, together)


QWEN = tiny_model()
PROMPTS = st.lists(st.lists(st.integers(3, 258), min_size=1, max_size=12), min_size=1, max_size=6)


@settings(max_examples=25)
@given(PROMPTS, st.sampled_from([0.0, 0.7, 1.0, 1.5]), st.sampled_from([0.3, 0.9, 1.0]), st.sampled_from([0.0, 0.5]))
def test_whatever_the_batch_a_request_gets_its_own_tokens(prompts, temperature, top_p, penalty):
    jobs = jobs_for(prompts, temperature=temperature, top_p=top_p, frequency_penalty=penalty, presence_penalty=-penalty)
    together = run(QWEN, jobs, frozenset({2}))
    assert [c.token_ids for c in together] == [run(QWEN, [job], frozenset({2}))[0].token_ids for job in jobs]
    assert_trainable(QWEN, jobs, together)


def test_settings_of_one_row_do_not_reach_its_neighbours():
    """A row that keeps all tokens is drawn from all of them beside one whose tail is cut, and a
    plain one as it is beside a greedy one."""
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
    """Knows no cache, no mask and no positions: the next token is the last one and 1, whatever
    else."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(50.0))
        self.lengths = []

    def forward(self, input_ids):
        self.lengths.append(input_ids.shape[1])
        return SimpleNamespace(logits=self.scale * torch.nn.functional.one_hot((input_ids + 1) % 10, 10).float())


def test_a_model_without_a_cache_reads_the_whole_row_again():
    model = Bare()
    jobs = [
        DecodeRequest([1, 2], SamplingParams(temperature=1.0), 3, 0),
        DecodeRequest([4], SamplingParams(temperature=1.0), 4, 0),
    ]
    assert [c.token_ids for c in run(model, jobs)] == [[3, 4, 5], [5, 6, 7, 8]]
    assert model.lengths == [2, 3, 4, 5]


def test_an_end_token_ends_its_row_and_no_other():
    jobs = [DecodeRequest([1], SamplingParams(temperature=0.0), 8), DecodeRequest([5], SamplingParams(temperature=0.0), 8)]
    got = run(Bare(), jobs, frozenset({7}))
    assert [(c.token_ids, c.finish_reason) for c in got] == [([2, 3, 4, 5, 6, 7], "stop"), ([6, 7], "stop")]


def test_a_stop_on_the_last_token_allowed_is_a_stop():
    job = DecodeRequest([1], SamplingParams(temperature=0.0), 3, contains_stop=lambda ids: ids[-2:] == [3, 4])
    got = run(Bare(), [job])[0]
    assert (got.token_ids, got.finish_reason) == ([2, 3, 4], "stop")
    job = DecodeRequest([1], SamplingParams(temperature=0.0), 3, contains_stop=lambda ids: ids[-1] == 5)
    assert run(Bare(), [job])[0].finish_reason == "length"


def test_a_row_that_nobody_waits_for_is_left_out_of_the_rest():
    model = Bare()
    asked = iter([False, True])
    jobs = [
        DecodeRequest([1], SamplingParams(temperature=0.0), 9, is_abandoned=lambda: next(asked)),
        DecodeRequest([4], SamplingParams(temperature=0.0), 3),
    ]
    assert run(model, jobs)[1].token_ids == [5, 6, 7]
    assert len(model.lengths) == 3


def test_a_model_is_left_module_by_module_as_it_was_and_can_be_trained():
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


def test_a_model_that_fails_is_left_as_it_was_too():
    model = tiny_model().train()
    model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model, jobs_for([[5]]))
    assert model.training
    assert torch.is_grad_enabled()


def test_a_model_in_bfloat16_gives_the_log_probabilities_of_its_own_forward_pass():
    model = tiny_model().to(torch.bfloat16)
    job = DecodeRequest([5, 6, 7], SamplingParams(temperature=1.0), 8, 0)
    got = run(model, [job])[0]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([job.prompt_ids + got.token_ids])).logits[0].float()
    expected = torch.log_softmax(logits, -1)[2:-1].gather(1, torch.tensor(got.token_ids)[:, None]).squeeze(1).tolist()
    assert got.logprobs == pytest.approx(expected, abs=0.15)  # 8 bits of mantissa on logits of about 10
