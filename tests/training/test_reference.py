"""References: what they score, and that training does not change them."""

import asyncio
from dataclasses import replace

import pytest
import torch
from maxent_batches import episodes, gradient_of_the_trainer
from training_samples import ListSource, assert_same_tensors, cpu_config, tiny_model, weights_of

from ludic.errors import ConfigError, DataError, DataTypeError
from ludic.models.lora import adapters_off
from ludic.training import (
    AttachedReference,
    CachedReference,
    FrozenModel,
    LoraSettings,
    Trainer,
    WithoutAdapters,
    apply_lora,
    make_grpo,
)
from ludic.training.algorithm import forward_logits
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.packing import truncate_item
from ludic.training.batching.sample_codec import encode_batch
from ludic.training.loss import SharedContext
from ludic.training.types import SampleAttachments, SAWBatch

TURNS = (1, 3, 2, 1)


def micro_batches(**config):
    cfg = cpu_config(max_seq_len=120, micro_token_budget=200, **config)
    macro = MacroBatch.ingest(episodes(TURNS), cfg.max_seq_len, merge_turns=True)
    return list(MiniBatch(macro, torch.arange(len(macro.items)).numpy(), cfg))


def actions(logps, micro_batch):
    mask = SharedContext(micro_batch.tensors["input_ids"], micro_batch.tensors).token_mask
    return logps[mask.bool()]


def direct(model, micro_batch, temperature=1.0):
    with torch.no_grad():
        return SharedContext(forward_logits(model, micro_batch.tensors), micro_batch.tensors, temperature=temperature).token_logp


def score(reference, micro_batch):
    return asyncio.run(_await(reference.logps(micro_batch)))


async def _await(value):
    return await value


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_frozen_model_is_a_copy_that_training_does_not_change(temperature):
    model = tiny_model()
    cfg = cpu_config(temperature=temperature, lr=0.1)
    frozen = FrozenModel(model, cfg)
    before = [actions(direct(model, each, temperature), each) for each in micro_batches()]
    trainer = Trainer(
        model=model,
        algo=make_grpo(group_size=4, reference_kl=0.1),
        batch_source=ListSource(episodes()),
        cfg=cfg,
        reference=frozen,
    )
    trainer.train_step_sync()
    for micro_batch, expected in zip(micro_batches(), before, strict=True):
        torch.testing.assert_close(actions(score(frozen, micro_batch), micro_batch), expected, rtol=0, atol=1e-6)
        assert (actions(direct(model, micro_batch, temperature), micro_batch) - expected).abs().max() > 1e-2
    assert not any(parameter.requires_grad for parameter in frozen.model.parameters())
    assert not frozen.model.training
    assert model.training


def test_a_frozen_model_is_read_from_a_folder(tmp_path):
    model = tiny_model(seed=5)
    model.save_pretrained(tmp_path)
    frozen = FrozenModel.from_pretrained(str(tmp_path), cpu_config())
    assert_same_tensors(weights_of(frozen.model), weights_of(model))
    with pytest.raises(ConfigError, match="nowhere"):
        FrozenModel.from_pretrained(str(tmp_path / "nowhere"), cpu_config())


def test_without_adapters_the_base_scores_and_the_model_is_as_before():
    base, cfg = tiny_model(), cpu_config()
    adapted = apply_lora(tiny_model(), LoraSettings(rank=2, dropout=0.3))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3)
    backend = TorchBackend(adapted, cfg, algo=make_grpo(group_size=4))
    before, flags = weights_of(adapted), [(p.requires_grad, m.training) for m in adapted.modules() for p in m.parameters(False)]
    for micro_batch in micro_batches():
        scored = score(WithoutAdapters(backend), micro_batch)
        own = backend.forward_logprobs(micro_batch).wait()
        of_base, scored, own = (actions(logps, micro_batch) for logps in (direct(base, micro_batch), scored, own))
        torch.testing.assert_close(scored, of_base, rtol=0, atol=1e-6)
        assert (own - scored).abs().max() > 1e-3
    assert_same_tensors(weights_of(adapted), before)
    assert [(p.requires_grad, m.training) for m in adapted.modules() for p in m.parameters(False)] == flags


def test_a_model_without_adapters_has_none_to_switch_off():
    with pytest.raises(ConfigError, match="no adapters"), adapters_off(tiny_model()):
        pass


class Counting:
    """A reference that counts its calls."""

    def __init__(self, model):
        self.model, self.calls = model, 0

    def logps(self, micro_batch):
        self.calls += 1
        return direct(self.model, micro_batch)


@pytest.mark.parametrize("packing", ["optimal", "padding_free"])
def test_a_cached_reference_asks_once_for_samples_in_any_layout(packing):
    inner = Counting(tiny_model())
    cached = CachedReference(inner)
    for micro_batch in micro_batches():
        scored = score(cached, micro_batch)
        torch.testing.assert_close(
            actions(scored, micro_batch), actions(direct(inner.model, micro_batch), micro_batch), rtol=0, atol=1e-6
        )
    asked = inner.calls
    assert asked == len(micro_batches())
    for micro_batch in micro_batches(packing=packing):
        torch.testing.assert_close(
            actions(score(cached, micro_batch), micro_batch),
            actions(direct(inner.model, micro_batch), micro_batch),
            rtol=0,
            atol=1e-5,
        )
    assert inner.calls == asked
    assert cached.hits == len(micro_batches(packing=packing))


def test_a_cached_reference_forgets_the_samples_that_it_used_longest_ago():
    inner = Counting(tiny_model())
    cached = CachedReference(inner, max_samples=1)
    for _ in range(2):
        for micro_batch in micro_batches():
            score(cached, micro_batch)
    assert inner.calls == 2 * len(micro_batches())
    with pytest.raises(ConfigError, match="max_samples"):
        CachedReference(inner, max_samples=0)


def test_the_same_ids_with_other_actions_are_another_sample():
    items = episodes((1, 1, 1, 1))
    first = items[0]
    macro = MacroBatch.ingest([first], 64)
    inner = Counting(tiny_model())
    cached = CachedReference(inner)
    cfg = cpu_config()
    [one] = MiniBatch(macro, torch.arange(1).numpy(), cfg)
    score(cached, one)
    one.tensors["action_mask"] = one.tensors["action_mask"].clone()
    one.tensors["action_mask"][0, 1] = 1.0
    score(cached, one)
    assert inner.calls == 2


def attach(items, model):
    """The items with the log-probabilities of `model`, one forward pass each."""
    attached = []
    for item in items:
        ids = torch.tensor([item.input_ids])
        with torch.no_grad():
            logps = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        of_actions = logps[torch.tensor(item.action_mask[1:]).bool()].tolist()
        attached.append(replace(item, attachments=replace(item.attachments, reference_logps=of_actions)))
    return attached


def test_attached_log_probabilities_are_the_reference_and_nothing_is_scored():
    items, algo = episodes(TURNS), make_grpo(group_size=4, reference_kl=0.3)
    scored, prepared = gradient_of_the_trainer(algo, items, tiny_model(), reference=FrozenModel(tiny_model(seed=1), cpu_config()))
    given, without = gradient_of_the_trainer(algo, attach(items, tiny_model(seed=1)), tiny_model(), reference=AttachedReference())
    assert_same_tensors(given, scored, atol=1e-6)
    assert (prepared.stats["reference/scored"], without.stats["reference/scored"]) == (len(items), 0)


def test_attached_log_probabilities_are_cut_with_their_sample():
    items = attach(episodes((1,) * 4), tiny_model(seed=1))
    cut = truncate_item(items[0], len(items[0].input_ids) - 1)
    assert cut.attachments.reference_logps == items[0].attachments.reference_logps[:-1]


def test_samples_that_lack_them_are_named():
    items = attach(episodes((1,) * 4), tiny_model(seed=1))
    bare = replace(items[2], attachments=SampleAttachments(items[2].attachments.actor_logps))
    short = replace(items[2], attachments=replace(items[2].attachments, reference_logps=[-1.0]))
    algo = make_grpo(group_size=4, reference_kl=0.3)
    for broken, words in ((bare, "not every sample has reference_logps"), (short, "r2/0 has 1 reference_logps")):
        with pytest.raises(DataError, match=words):
            gradient_of_the_trainer(algo, [*items[:2], broken, items[3]], tiny_model(), reference=AttachedReference())
    with pytest.raises(DataTypeError, match="reference_logps"):
        SampleAttachments(reference_logps="-1.0")


def test_what_cannot_be_sent_is_refused_and_not_lost():
    batch = SAWBatch(attach(episodes((1,) * 4), tiny_model(seed=1)))
    for is_exact in (False, True):
        with pytest.raises(DataError, match="reference_logps"):
            encode_batch(batch, is_exact=is_exact)
