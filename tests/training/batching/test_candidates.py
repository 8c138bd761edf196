"""Candidates: what top-p, top-k and min-p left when a token was sampled. The trainer computes the
same distribution, in every layout."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from training_samples import ListSource, assert_same_tensors, branching_items, cpu_config, dialogues, gradients_of, tiny_model

from ludic.errors import ConfigError, DataError, DataTypeError
from ludic.inference import SamplingParams
from ludic.inference.local import LocalChatClient
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.training import (
    ConstantCredit,
    RLAlgorithm,
    SampleAttachments,
    SAWBatch,
    SAWItem,
    Trainer,
    collate_saw_items,
    make_grpo,
)
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.packing import collate_micro_batches, truncate_item
from ludic.training.batching.sample_codec import decode_batch, encode_batch
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.loss import CompositeLoss, EntropyBonus, LossTerm, SharedContext
from ludic.training.loss.logprobs import compute_among_candidates
from ludic.training.preflight.comparison import compare
from ludic.training.queue.entries import (
    EntryError,
    Group,
    SampleGroup,
    as_played,
    decode_group,
    decode_samples,
    encode_group,
    encode_samples,
)
from ludic.training.rollouts.episodes import GarbageError, SampleCheck, check_rollouts
from ludic.training.rollouts.to_samples import sample_from_step
from ludic.types import Rollout, Step, TokenTrace

CUTS = [{"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.2}, {"top_p": 0.8, "top_k": 9, "min_p": 0.01}]


def sharp_model():
    """A model whose next tokens have few likely candidates."""
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(5))
    return model


def sampled(model, cut, count=6, **options):
    """Samples of random prompts at temperature 0.7, with their candidates."""
    client = LocalChatClient(model, make_byte_tokenizer(), logprobs_mode="processed", keep_candidates=True, **options)
    params = SamplingParams(temperature=0.7, max_tokens=9, **cut)

    async def sample():
        prompts = [[5 + seed, 9, 40 + seed] for seed in range(count)]
        return await asyncio.gather(
            *(client.complete_tokens(ids, sampling=params, seed=seed) for seed, ids in enumerate(prompts))
        )

    items = []
    for number, trace in enumerate(asyncio.run(sample())):
        step = Step(0, "o", "a", None, 1.0, False, True, trace=trace)
        items.append(sample_from_step(Rollout(id=f"r{number}", steps=[step]), step, float(number) - 2))
    return items


@given(
    st.lists(st.lists(st.floats(-9, 9), min_size=6, max_size=6), min_size=2, max_size=5),
    st.lists(st.sets(st.integers(0, 5), max_size=5), min_size=5, max_size=5),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_the_distribution_is_softmax_over_the_candidates(rows, candidates, temperature):
    """Value and gradient are those of logits with -inf at all other tokens."""
    length = len(rows)
    ids = torch.tensor([[3, *(position % 6 for position in range(1, length))]])
    own = [sorted({*extra, int(ids[0, position])}) if extra else [] for position, extra in enumerate(candidates[:length])]
    among = torch.tensor([[[*(token + 1 for token in kept), *[0] * (6 - len(kept))] for kept in own]])
    logits, plain = (torch.tensor([rows], dtype=torch.float32, requires_grad=True) for _ in range(2))
    got, entropy = compute_among_candidates(logits, ids, among, temperature=temperature)
    masked = torch.stack(
        [
            row if not kept else row.masked_fill(~torch.isin(torch.arange(6), torch.tensor(kept)), -torch.inf)
            for row, kept in zip(plain[0, :-1], own[1:], strict=True)
        ]
    )
    whole = (masked / temperature).log_softmax(dim=-1)
    want = whole.gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-5)
    terms = whole.exp() * whole.masked_fill(whole == -torch.inf, 0.0)
    torch.testing.assert_close(entropy[0], -terms.sum(dim=-1), rtol=1e-4, atol=1e-5)
    (got.sum() + 0.5 * entropy.sum()).backward()
    (want.sum() - 0.5 * terms.sum()).backward()
    torch.testing.assert_close(logits.grad, plain.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: "+".join(cut))
def test_the_trainer_computes_what_the_sampler_sampled_from(cut):
    """Without the candidates, its log-probabilities are far from the sampler's."""
    model, cfg = sharp_model(), cpu_config(temperature=0.7, logits="full")
    items, backend = sampled(model, cut), TorchBackend(model, cfg, algo=make_grpo(group_size=2))
    assert all(token in among for each in items for token, among in actions_with_candidates(each))
    found = asyncio.run(compare(backend, cfg, items))
    assert found.max <= 5e-6
    assert found.mean <= 1e-6
    bare = [replace(each, attachments=replace(each.attachments, candidates=None)) for each in items]
    assert asyncio.run(compare(backend, cfg, bare)).mean > 0.05


def actions_with_candidates(item):
    actions = [token for token, is_action in zip(item.input_ids, item.action_mask, strict=True) if is_action]
    return zip(actions, item.attachments.candidates, strict=True)


def test_a_cut_of_nothing_keeps_nothing():
    assert [each.attachments.candidates for each in sampled(tiny_model(), {})] == [None] * 6


@pytest.mark.parametrize("packing", ["optimal", "padding_free"])
@pytest.mark.parametrize("budget", [80, 400])
def test_the_gradient_is_the_same_in_every_layout(packing, budget):
    """Of samples with and without candidates, and of turns that share a row."""
    items = sampled(sharp_model(), {"top_p": 0.7}) + dialogues((2, 3), seed=4)
    items = [replace(each, weight=float(number % 3) - 1) for number, each in enumerate(items)]
    expected, without_any = gradients(items, "optimal", 200), gradients([without(each) for each in items], packing, budget)
    assert_same_tensors(gradients(items, packing, budget), expected, atol=1e-5)
    assert max((without_any[name] - value).abs().max() for name, value in expected.items()) > 1e-3


def without(item):
    return replace(item, attachments=replace(item.attachments, candidates=None))


def gradients(items, packing, budget, algo=None):
    model = sharp_model()
    cfg = cpu_config(packing=packing, micro_token_budget=budget, max_seq_len=64, logits="full")
    backend, macro = (
        TorchBackend(model, cfg, algo=algo or make_grpo(group_size=2)),
        MacroBatch.ingest(items, 64, merge_turns=True),
    )
    batch = MiniBatch(macro, np.arange(len(macro.items)), cfg)
    asyncio.run(run(backend, batch))
    return gradients_of(model)


async def run(backend, batch):
    await backend.forward_backward(batch, totals=batch.totals).result()


def test_prefixes_are_not_shared_by_default_where_samples_have_candidates():
    items = branching_items([6, 6]) + sampled(sharp_model(), {"top_p": 0.7}, count=2)

    def has_trees(items, prefix_sharing):
        batch = MacroBatch.ingest(items, 64)
        return TreeMiniBatch(batch, np.arange(len(items)), cpu_config(prefix_sharing=prefix_sharing)).has_trees

    assert has_trees([without(each) for each in items], "auto")
    assert not has_trees(items, "auto")
    assert has_trees(items, "tree")  # which the loss refuses


def test_candidates_travel_with_their_sample_and_are_cut_with_it():
    items = sampled(sharp_model(), {"top_k": 2}, count=3)
    items[1] = without(items[1])
    for got in (
        decode_batch(*encode_batch(SAWBatch(items))).items,
        decode_samples(encode_samples(SampleGroup("p", 0, items))).items,
    ):
        assert [as_lists(each) for each in got] == [as_lists(each) for each in items]
    short = truncate_item(items[0], 5)
    assert as_lists(short) == as_lists(items[0])[:2]
    assert as_lists(decode_batch(*encode_batch(SAWBatch([truncate_item(items[0], 3)]))).items[0]) == []
    [micro_batch] = collate_micro_batches(items, pad_token_id=0, device="cpu", micro_token_budget=99, max_seq_len=16)
    assert torch.equal(micro_batch.tensors["candidates"], collate_saw_items(items, pad_token_id=0, device="cpu")["candidates"])


def as_lists(item):
    candidates = item.attachments.candidates
    return None if candidates is None else [list(map(int, each)) for each in candidates]


def test_candidates_travel_with_their_rollout():
    trace = TokenTrace([1], [2, 3], [-0.5, -0.1], "stop", [[2, 7], []])
    assert TokenTrace.from_dict(trace.to_dict()) == trace
    step = Step(0, "o", "a", None, 1.0, False, True, trace=trace)
    group = Group("run", 0, 0, 0, "actor", 0.0, 0.0, as_played([Rollout(id="r", steps=[step])]))
    assert decode_group(encode_group(group)).played[0].steps[0].trace.candidates == [[2, 7], []]


def test_an_entry_with_candidates_outside_the_vocabulary_is_refused():
    item = SAWItem([5, 7], [1] * 2, [0, 1], 1.0, {}, SampleAttachments(candidates=[[7, 260]]))
    entry = encode_samples(SampleGroup("p", 0, [item]))
    assert len(decode_samples(entry, check=SampleCheck(vocab_size=261)).items) == 1
    with pytest.raises(EntryError, match=r"candidates .*260"):
        decode_samples(entry, check=SampleCheck(vocab_size=260))
    trace = TokenTrace([5], [7], [-0.5], "stop", [[7, 260]])
    rollout = Rollout(id="r", steps=[Step(0, "o", "a", None, 1.0, False, True, trace=trace)])
    with pytest.raises(GarbageError, match=r"candidates .*260"):
        check_rollouts([rollout], SampleCheck(vocab_size=260))


@pytest.mark.parametrize(
    ("candidates", "said"),
    [
        ([[7]], "candidates of 1 tokens for 2 action tokens"),
        ([[7], [300]], "with the sampled token"),
        ([[7, -1], [8]], "must be token ids"),
    ],
)
def test_candidates_of_another_form_are_refused(candidates, said):
    item = SAWItem([5, 7, 8], [1] * 3, [0, 1, 1], 1.0, {}, SampleAttachments(candidates=candidates))
    for read in (lambda: MacroBatch.ingest([item], 16), lambda: encode_batch(SAWBatch([item]))):
        with pytest.raises(DataError, match=said):
            read()
    with pytest.raises(DataTypeError, match="candidates must be a list"):
        SampleAttachments(candidates=3)


def test_losses_that_read_the_entropy_read_that_of_the_candidates():
    """In either order: the backward pass of the one does not overwrite what the other reads."""
    items, grads = sampled(sharp_model(), {"top_p": 0.7}), []
    for order in (1, -1):
        terms = [LossTerm("policy", make_grpo(group_size=2).loss), LossTerm("entropy", EntropyBonus(), 0.1)][::order]
        grads.append(gradients(items, "optimal", 400, algo=RLAlgorithm("a", ConstantCredit(1.0), CompositeLoss(terms))))
    assert_same_tensors(*grads, atol=1e-5)


def test_candidates_outside_the_vocabulary_and_without_whole_logits_are_refused():
    items = sampled(sharp_model(), {"top_k": 2}, count=2)
    tensors = collate_saw_items(items, pad_token_id=0, device="cpu")
    with pytest.raises(DataError, match=r"token \d+, .*vocabulary, 0\.\.2"):
        _ = SharedContext(torch.zeros(*tensors["input_ids"].shape, 3), tensors).token_logp
    cfg = cpu_config(logits="chunked")
    trainer = Trainer(model=sharp_model(), algo=make_grpo(group_size=2), batch_source=ListSource(items), cfg=cfg)
    with pytest.raises(DataError, match=r"trainer\.logits=full"):
        trainer.train_step_sync()
    with pytest.raises(ConfigError, match="logprobs_mode='processed'"):
        LocalChatClient(tiny_model(), make_byte_tokenizer(), keep_candidates=True)
