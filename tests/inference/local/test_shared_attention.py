"""Attention of rows that share prompts: it equals attention over copies of the prompts, and models
that cannot use it decode as before."""

import threading

import pytest
import torch
import transformers
from decoding import KINDS, LLAMA, SIZES, assert_trainable, make_model
from hypothesis import given, settings, strategies as st
from playing import tiny_model
from transformers.cache_utils import DynamicCache

from ludic.inference import SamplingParams
from ludic.inference.client import Episode
from ludic.inference.local import decode as decoding
from ludic.inference.local.decode import DecodeRequest, decode
from ludic.inference.local.prefixes import PrefixCache
from ludic.inference.local.row_cache import RowCache, attend_rows
from ludic.models.packed_attention import OWN, set_attention

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12]]


@pytest.fixture(autouse=True)
def _share_always(monkeypatch):
    monkeypatch.setattr(decoding, "LEAST_SHARED_TOKENS", 1)


@pytest.fixture
def caches(monkeypatch):
    """The caches that are made."""
    made, construct = [], RowCache.__init__

    def record(self, *args, **keywords):
        construct(self, *args, **keywords)
        made.append(self)

    monkeypatch.setattr(RowCache, "__init__", record)
    return made


def jobs_for(rows, **sampling):
    return [
        DecodeRequest(PROMPTS[row % 3], SamplingParams(**{"temperature": 1.0, **sampling}), limit=1 + (5 * row) % 17, seed=row)
        for row in range(rows)
    ]


def run(model, jobs, **keywords):
    return decode(model, jobs, eos_ids=frozenset({17, 40}), pad_id=0, **keywords)


@settings(max_examples=60)
@given(
    prompt_of_row=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    per_head=st.integers(1, 3),
    lengths=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    padded=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 999),
)
def test_attention_equals_that_over_copies_of_the_prompts(prompt_of_row, per_head, lengths, padded, scale, seed):
    prompt_of_row = torch.tensor([sorted(set(prompt_of_row)).index(p) for p in prompt_of_row])
    generator = torch.Generator().manual_seed(seed)
    heads, size, prompts, rows = 2, 4, int(prompt_of_row.max()) + 1, len(prompt_of_row)
    keys, values = (torch.randn(prompts, heads, lengths[0], size, generator=generator) for _ in range(2))
    cache = RowCache(DynamicCache([(keys, values)]), prompt_of_row, limit=9, share=True)
    cache.update(*(torch.randn(rows, heads, lengths[1], size, generator=generator) for _ in range(2)), 0)
    mask = None
    if padded:  # on the left of the prompt, which the rows of a group have in common
        starts = torch.randint(0, lengths[0], (prompts,), generator=generator)[prompt_of_row]
        mask = (torch.arange(sum(lengths)) >= starts[:, None])[:, None, None]
    query = torch.randn(rows, heads * per_head, 1, size, generator=generator)
    got = attend_rows(query, cache.layers[0], mask, scale)
    whole = [part.repeat_interleave(per_head, dim=1).double() for part in cache.read_rows(torch.arange(rows))[0]]
    expected = torch.nn.functional.scaled_dot_product_attention(query.double(), *whole, attn_mask=mask, scale=scale)
    torch.testing.assert_close(got, expected.transpose(1, 2).float(), atol=2e-5, rtol=1e-4)


def test_two_rows_of_one_prompt_by_hand():
    # One head of size 1, keys 0, values 4 (prompt), 0 and 8 (rows): every softmax is a mean of two,
    # (4 + 0) / 2 and (4 + 8) / 2.
    zero = torch.zeros(1, 1, 1, 1)
    cache = RowCache(DynamicCache([(zero, zero + 4)]), torch.tensor([0, 0]), limit=1, share=True)
    cache.update(torch.zeros(2, 1, 1, 1), torch.tensor([0.0, 8.0]).view(2, 1, 1, 1), 0)
    assert attend_rows(torch.ones(2, 1, 1, 1), cache.layers[0], None, 1.0).flatten().tolist() == [2.0, 6.0]


MORE = {
    **KINDS,
    "Qwen2 without groups of heads": ("Qwen2Config", "Qwen2ForCausalLM", {**LLAMA, "num_key_value_heads": 4}),
    "soft caps": ("Gemma2Config", "Gemma2ForCausalLM", {**LLAMA, "head_dim": 8, "sliding_window": 4}),
    "attention sinks": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**LLAMA, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2},
    ),
    "partial rotation": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**SIZES, "intermediate_size": 48}),
}
SHARE = {"Llama", "learned positions", "Qwen2 without groups of heads", "partial rotation"}


@pytest.mark.parametrize("kind", MORE)
def test_requests_that_share_prompts_get_the_tokens_of_single_requests(kind, caches, monkeypatch):
    monkeypatch.setitem(KINDS, kind, MORE[kind])
    model = make_model(kind)
    jobs = jobs_for(11)
    together = run(model, jobs)
    assert any(cache.shares for cache in caches) == (kind in SHARE)
    assert [c.token_ids for c in together] == [run(model, [job])[0].token_ids for job in jobs]
    assert_trainable(model, jobs, together)


QWEN = tiny_model(vocab_size=99)


@settings(max_examples=25)
@given(st.integers(2, 12), st.sampled_from([0.0, 1.0, 1.5]), st.sampled_from([0.5, 1.0]))
def test_any_number_of_rows_and_any_settings(rows, temperature, top_p):
    jobs = jobs_for(rows, temperature=temperature, top_p=top_p)
    together = run(QWEN, jobs)
    assert [c.token_ids for c in together] == [run(QWEN, [job])[0].token_ids for job in jobs]
    assert_trainable(QWEN, jobs, together)


def test_few_tokens_are_not_worth_sharing(caches, monkeypatch):
    # Rows 0 to 5 of prompts 0, 1, 2 padded to 4 tokens: sharing saves 3 copies of 4 tokens.
    for least, shares in [(12, True), (13, False)]:
        monkeypatch.setattr(decoding, "LEAST_SHARED_TOKENS", least)
        run(QWEN, jobs_for(6))
        assert caches.pop().shares == shares


def test_half_precision_is_not_shared(caches):
    run(tiny_model().to(torch.bfloat16), jobs_for(6))
    assert [cache.shares for cache in caches] == [False]


def test_a_later_turn_reuses_a_shared_prompt():
    model, prefixes = make_model("Llama"), PrefixCache(1 << 24)
    episodes = [Episode() for _ in range(6)]
    jobs = [DecodeRequest(PROMPTS[i % 2], SamplingParams(), limit=2 + i, seed=i, episode=e) for i, e in enumerate(episodes)]
    first = decode(model, jobs, eos_ids=frozenset(), pad_id=0, prefixes=prefixes)
    assert prefixes.nbytes > 0
    later = [
        DecodeRequest([*job.prompt_ids, *done.token_ids, 20, 21], SamplingParams(), limit=5, seed=3, episode=job.episode)
        for job, done in zip(jobs, first, strict=True)
    ]
    read = []
    model.register_forward_pre_hook(lambda _m, _a, given: read.append(given["input_ids"].shape[1]), with_kwargs=True)
    together = decode(model, later, eos_ids=frozenset(), pad_id=0, prefixes=prefixes)
    assert read[0] == 3  # the last sampled token was never an input
    assert_trainable(model, later, together)
    alone = [decode(model, [job], eos_ids=frozenset(), pad_id=0)[0].token_ids for job in later]
    assert [c.token_ids for c in together] == alone


@pytest.mark.parametrize("prompts", [PROMPTS, [[5, 6, 7], [8, 9, 10]]], ids=["with a mask", "without"])
def test_a_model_that_reads_other_keys_while_it_decodes_gets_whole_rows(caches, prompts):
    model = tiny_model(vocab_size=99)
    own = model.model.layers[1].self_attn.forward

    def other_path(hidden_states, past_key_values=None, **keywords):
        """Copies the keys of the cache when one token is read, as an attention of its own would."""
        if hidden_states.shape[1] > 1:
            return own(hidden_states, past_key_values=past_key_values, **keywords)
        copied = type("Copied", (), {"update": lambda _, *a, **k: [t.clone() for t in past_key_values.update(*a, **k)]})()
        return own(hidden_states, past_key_values=copied, **keywords)

    jobs = [DecodeRequest(prompts[i % len(prompts)], SamplingParams(temperature=1.0), limit=1 + 2 * i, seed=i) for i in range(8)]
    expected = [c.token_ids for c in run(model, jobs)]
    model.model.layers[1].self_attn.forward = other_path
    got = run(model, jobs)
    assert [cache.shares for cache in caches] == [True, False]
    assert [c.token_ids for c in got] == expected
    assert_trainable(QWEN, jobs, got)


def test_the_models_attention_is_restored():
    model = tiny_model(vocab_size=99)
    seen = []
    handle = model.lm_head.register_forward_hook(lambda *_: seen.append(model.config._attn_implementation))
    run(model, jobs_for(4))
    assert set(seen) == {"ludic_shared_prompts"}
    assert model.config._attn_implementation == "sdpa"
    handle.remove()
    model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model, jobs_for(4))
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("own", OWN)
def test_samples_do_not_depend_on_whether_a_trainer_has_set_its_attention(caches, own):
    """A run that is resumed sets it before its first sample, and not after."""
    model, jobs = tiny_model(vocab_size=99), jobs_for(11)
    before = run(model, jobs)
    set_attention(model, own)
    after = run(model, jobs)
    assert [cache.shares for cache in caches] == [True, True]
    assert model.config._attn_implementation == own
    assert [(each.token_ids, each.logprobs) for each in after] == [(each.token_ids, each.logprobs) for each in before]


def test_other_attention_implementations_are_left_alone(caches):
    model = transformers.Qwen2ForCausalLM._from_config(QWEN.config, attn_implementation="eager").eval()
    jobs = jobs_for(6)
    run(model, jobs)
    assert [cache.shares for cache in caches] == [False]
    assert model.config._attn_implementation == "eager"
    QWEN.config._attn_implementation = "sdpa"


def test_a_forward_pass_of_another_thread_is_not_affected():
    model = tiny_model(vocab_size=99)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    got = []

    def forward():
        with torch.no_grad():
            got.append(model(input_ids=ids).logits)

    def beside(*_):
        handle.remove()
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join(60)

    handle = model.model.layers[1].register_forward_hook(beside)
    run(model, jobs_for(6))
    assert torch.equal(got[0], expected)
