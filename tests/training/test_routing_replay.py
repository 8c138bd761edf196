"""Routing replay: the trainer computes with the experts that the sampler chose, in every layout,
and after every way that a sample takes. The balance loss is the same for every split."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from training_samples import (
    ListSource,
    assert_same_tensors,
    branching_items,
    cpu_config,
    dialogues,
    gradients_of,
    tiny_model,
)
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ludic.errors import ConfigError, DataError
from ludic.inference import SamplingParams
from ludic.inference.client import new_episode
from ludic.inference.local import LocalChatClient
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.models.packed_attention import PACKED, set_attention
from ludic.models.sharding import enable_checkpointing
from ludic.training import ConstantCredit, SampleAttachments, SAWBatch, SAWItem, Trainer, make_grpo, make_opd
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching import tree_batches
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.packing import truncate_item
from ludic.training.batching.sample_codec import decode_batch, encode_batch
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.distillation import Teacher
from ludic.training.info_seed.seed_tags import with_prompt
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
from ludic.training.reference import FrozenModel
from ludic.training.rollouts.to_samples import batch_from_rollouts
from ludic.types import Rollout, Routes, Step, TokenTrace

EXPERTS, CHOSEN, LAYERS = 8, 2, 2


@pytest.fixture(autouse=True)
def every_common_token_is_shared(monkeypatch):
    monkeypatch.setattr(tree_batches, "MIN_SHARED", 1)


def mixture(seed=0):
    torch.manual_seed(seed)
    settings = {"hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1}
    settings |= {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 16, "norm_topk_prob": True}
    settings |= {"head_dim": 8, "vocab_size": 261, "max_position_embeddings": 128, "initializer_range": 0.3}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings))
    set_attention(model, PACKED)
    return model


class RoundedRouter(Qwen3MoeTopKRouter):
    """Chooses by probabilities of 8 bits, and computes the gates in float32: the experts of another
    engine."""

    def forward(self, states):
        logits = states.reshape(-1, self.hidden_dim) @ self.weight.T
        probabilities = logits.softmax(dim=-1)
        chosen = probabilities.to(torch.float8_e5m2).float().topk(self.top_k).indices
        gates = probabilities.gather(1, chosen)
        return logits, gates / gates.sum(dim=-1, keepdim=True), chosen


def rounded(model):
    for module in model.modules():
        if isinstance(module, Qwen3MoeTopKRouter):
            module.__class__ = RoundedRouter
    return model


def client_of(model, **options):
    return LocalChatClient(model, make_byte_tokenizer(), keep_routes=True, **options)


def sampled(client, *, prompts=3, group=2, turns=2, in_episode=True):
    """Episodes of several turns; each prompt is answered `group` times."""

    async def play(prompt, seed):
        steps, ids = [], list(prompt)
        with new_episode():
            for turn in range(turns):
                params = SamplingParams(temperature=1.0, max_tokens=4 + seed % 3)
                trace = await client.complete_tokens(ids, sampling=params, seed=seed + 100 * turn)
                steps.append(Step(turn, "o", "a", "o", 1.0, False, turn + 1 == turns, trace=trace))
                ids = [*trace.prompt_token_ids, *trace.completion_token_ids, 50 + turn, 60 + seed % 5]
        return Rollout(id=f"r{prompt[0]}-{seed}", steps=steps, meta={"request_meta": {"group_id": str(prompt[0])}})

    async def all_episodes():
        questions = [[5 + number, 9, 40, 41, 42 + number, 9, 9] for number in range(prompts)]
        return await asyncio.gather(*(play(question, seed) for question in questions for seed in range(group)))

    return asyncio.run(all_episodes())


def items_of(rollouts):
    items = batch_from_rollouts(rollouts, ConstantCredit(1.0)).items
    return [replace(each, weight=float(number % 3) - 1.25) for number, each in enumerate(items)]


def bare(item):
    return replace(item, attachments=replace(item.attachments, routes=None))


def algo():
    return make_grpo(group_size=2)


def test_trainer_and_sampler_agree_though_the_sampler_chose_other_experts():
    model = mixture()
    items = items_of(sampled(client_of(rounded(mixture()))))
    cfg = cpu_config(max_seq_len=64)
    off = asyncio.run(compare(TorchBackend(model, cfg, algo=algo()), cfg, items))
    assert off.max > 1e-2
    cfg = replace(cfg, replay_routing=True)
    on = asyncio.run(compare(TorchBackend(model, cfg, algo=algo()), cfg, items))
    assert on.max <= 1e-5


def test_routes_are_of_every_token_that_the_model_read_and_do_not_depend_on_the_prefix_cache():
    cached = sampled(client_of(mixture()), turns=3)
    alone = sampled(client_of(mixture(), prefix_cache_bytes=0, max_batch_size=1), turns=3)
    for one, other in zip(cached, alone, strict=True):
        for step, same in zip(one.steps, other.steps, strict=True):
            tokens = len(step.trace.prompt_token_ids) + len(step.trace.completion_token_ids)
            assert step.trace.routes.array.shape == (tokens - 1, LAYERS, CHOSEN)
            assert step.trace.routes == same.trace.routes


def gradients(items, *, trees=False, merge_turns=True, model=None, **changes):
    model = mixture() if model is None else model
    cfg = cpu_config(**{"max_seq_len": 64, "replay_routing": True, **changes})
    backend = TorchBackend(model, cfg, algo=algo())
    macro = MacroBatch.ingest(items, cfg.max_seq_len, merge_turns=merge_turns)
    batch = (TreeMiniBatch if trees else MiniBatch)(macro, np.arange(len(macro.items)), cfg)

    async def run():
        return await backend.forward_backward(batch, totals=batch.totals).result()

    result = asyncio.run(run())
    return gradients_of(model), batch, result


LAYOUTS = [
    {"packing": "optimal", "micro_token_budget": 64},
    {"packing": "optimal", "micro_token_budget": 400, "merge_turns": False},
    {"packing": "padding_free", "micro_token_budget": 90},
    {"packing": "padding_free", "micro_token_budget": 90, "merge_turns": False},
    {"trees": True, "prefix_sharing": "tree", "micro_token_budget": 64},
    {"trees": True, "prefix_sharing": "tree", "micro_token_budget": 400},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_gradient_is_the_same_in_every_layout(layout):
    """Of sampled samples, of samples without routes, and of a group whose members have the same
    tokens but other experts."""
    items = [*items_of(sampled(client_of(rounded(mixture())))), *map(with_weight, dialogues((2, 3), seed=4))]
    items += [with_routes(each, number) for number, each in enumerate(branching_items((4, 3), seed=1))]
    expected, whole, _ = gradients(items, micro_token_budget=64, merge_turns=False, packing="greedy")
    got, batch, _ = gradients(items, **layout)
    assert len(whole) > 1
    assert_same_tensors(got, expected, atol=2e-5)
    without, _, _ = gradients(items, replay_routing=False, **layout)
    assert max((without[name] - value).abs().max() for name, value in expected.items()) > 1e-3
    if layout.get("trees"):
        assert batch.has_trees


def with_weight(item):
    return replace(item, weight=0.5)


def with_routes(item, seed):
    """Experts of three random tokens after some that all have in common."""
    draw, count = random.Random(seed % 3), len(item.input_ids) - 1
    common = random.Random(7)
    data = [(common if token < 5 else draw).sample(range(EXPERTS), CHOSEN) for token in range(count) for _ in range(LAYERS)]
    routes = Routes(bytes(expert for pair in data for expert in pair), LAYERS, CHOSEN, 1)
    return replace(item, weight=1.0, attachments=replace(item.attachments, routes=routes))


def test_samples_share_tokens_up_to_the_first_that_other_experts_computed():
    """Ids 1 2 3 4 of three samples. The second chose another expert for the third token, so it has
    its own branch from there; the third has the experts of the first."""
    chosen = [bytes([0, 1, 2, 3] * 4), bytes([0, 1, 2, 3] * 2 + [0, 1, 2, 4] + [0, 1, 2, 3])]
    items = [
        SAWItem([1, 2, 3, 4, 5 + number], [1] * 5, [0, 0, 0, 1, 1], 1.0, {"rollout_id": str(number)}, routed(data))
        for number, data in enumerate([*chosen, chosen[0]])
    ]
    cfg = cpu_config(replay_routing=True, prefix_sharing="tree", micro_token_budget=64)
    macro = MacroBatch.ingest(items, 32)
    [batch] = TreeMiniBatch(macro, np.arange(3), cfg)
    assert sorted(batch.tensors["prefix_trees"].input_ids[0].tolist()) == [1, 2, 3, 3, 4, 4, 5, 6, 7]
    assert sorted(batch.tensors["input_ids"].view(3, 5).tolist()) == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7]]
    plain = MacroBatch.ingest([bare(each) for each in items], 32)
    [whole] = TreeMiniBatch(plain, np.arange(3), replace(cfg, replay_routing=False))
    assert whole.tensors["prefix_trees"].input_ids.numel() == 7


def routed(data):
    return SampleAttachments(routes=Routes(data, LAYERS, CHOSEN, 1))


def test_turns_share_a_row_with_their_experts_and_only_with_them():
    items = items_of(sampled(client_of(mixture()), turns=3))
    macro = MacroBatch.ingest(items, 64, merge_turns=True)
    assert len(MiniBatch(macro, np.arange(len(items)), cpu_config(max_seq_len=64, replay_routing=True)).lengths) == 6
    first = items[0].attachments.routes
    flipped = bytes([(first.data[0] + 1) % EXPERTS]) + first.data[1:]
    items[0] = replace(items[0], attachments=replace(items[0].attachments, routes=first._replace(data=flipped)))
    macro = MacroBatch.ingest(items, 64, merge_turns=True)
    assert len(MiniBatch(macro, np.arange(len(items)), cpu_config(max_seq_len=64, replay_routing=True)).lengths) == 7


def test_gradient_checkpointing_computes_with_the_same_experts_again():
    items = items_of(sampled(client_of(rounded(mixture()))))
    expected, _, _ = gradients(items)
    model = mixture()
    enable_checkpointing(model)
    got, _, _ = gradients(items, model=model, router_aux_coef=0.0)
    assert_same_tensors(got, expected, atol=1e-6)


def test_routes_travel_with_their_sample_and_are_cut_with_it():
    items = items_of(sampled(client_of(mixture())))
    items[1] = bare(items[1])
    held = [each.attachments.routes for each in items]
    group = [replace(each, meta={"rollout_id": "r"}) for each in items]
    for got in (
        decode_batch(*encode_batch(SAWBatch(items))).items,
        decode_samples(encode_samples(SampleGroup("p", 0, group))).items,
    ):
        assert [each.attachments.routes for each in got] == held
    short = truncate_item(items[0], 5)
    assert short.attachments.routes == held[0].cut(5)
    assert len(short.attachments.routes.array) == 5


def test_routes_travel_with_their_rollout():
    rollouts = sampled(client_of(mixture()), prompts=1, group=1, turns=4)
    group = Group("run", 0, 0, 0, "actor", 0.0, 0.0, as_played(rollouts))
    payload = encode_group(group)
    [got] = decode_group(payload).played
    assert [step.trace.routes for step in got.steps] == [step.trace.routes for step in rollouts[0].steps]
    trace = rollouts[0].steps[0].trace
    assert TokenTrace.from_dict(trace.to_dict()) == replace(trace, routes=None)


def test_routes_of_another_form_are_refused():
    def item(data, width=1):
        return SAWItem(
            [5, 7, 8], [1] * 3, [0, 1, 1], 1.0, {"rollout_id": "r"}, SampleAttachments(routes=Routes(data, 2, 1, width))
        )

    for wrong, said in ((item(b"abc"), r"bytes, which are not"), (item(bytes(8)), r"routes of 4 tokens, and 3 ids")):
        for read in (lambda wrong=wrong: MacroBatch.ingest([wrong], 16), lambda wrong=wrong: encode_batch(SAWBatch([wrong]))):
            with pytest.raises(DataError, match=said):
                read()
    entry = encode_samples(SampleGroup("p", 0, [item(bytes(4))]))
    damaged = entry.replace(bytes([0xC4, 4]) + bytes(4), bytes([0xC4, 3]) + bytes(3))
    assert damaged != entry
    with pytest.raises(EntryError):
        decode_samples(damaged)
    trainer = Trainer(
        model=mixture(), algo=algo(), batch_source=ListSource(dialogues((2, 2))), cfg=cpu_config(replay_routing=True)
    )
    with pytest.raises(DataError, match=r"no sample has routes.*keep_routes"):
        trainer.train_step_sync()


def test_a_reference_routes_as_it_does():
    model, items = mixture(), items_of(sampled(client_of(rounded(mixture()))))
    cfg = cpu_config(max_seq_len=64, micro_token_budget=512, replay_routing=True)
    macro = MacroBatch.ingest(items, 64)
    [batch] = MiniBatch(macro, np.arange(len(items)), cfg)
    frozen = FrozenModel(model, cfg)
    plain = {name: value for name, value in batch.tensors.items() if name != "routes"}

    async def score(micro_batch):
        return await frozen.logps(micro_batch).result()

    assert torch.equal(asyncio.run(score(batch)), asyncio.run(score(replace(batch, tensors=plain))))


def test_tokens_under_another_prompt_have_no_routes():
    """The policy with another prompt, as in self-distillation, chooses experts itself."""
    items, prompt = items_of(sampled(client_of(rounded(mixture())))), [7] * 9
    shown = [with_prompt(item, prompt) for item in items]
    assert all(item.attachments.routes is not None for item in items)
    assert [item.attachments.routes for item in shown] == [None] * len(items)
    scored = {}
    for replays in (False, True):
        seen, cfg = [], cpu_config(max_seq_len=64, replay_routing=replays)
        own = make_opd(teacher=Teacher(prompt=lambda item: prompt))
        trainer = Trainer(model=mixture(), algo=own, batch_source=ListSource(items), cfg=cfg)
        prepare = trainer._prepare

        async def note(macro, number, prepare=prepare, seen=seen):
            prepared = await prepare(macro, number)
            seen.append(prepared.macro.token_columns["reference_logps"])
            return prepared

        trainer._prepare = note
        trainer.train_step_sync()
        [scored[replays]] = seen
    assert scored[True].keys() == scored[False].keys()
    assert all(torch.equal(scored[True][row], each) for row, each in scored[False].items())


def test_a_frozen_model_may_have_no_routers():
    """A dense teacher of a mixture."""
    items, cfg = items_of(sampled(client_of(mixture()))), cpu_config(max_seq_len=64, replay_routing=True, router_aux_coef=1.0)
    [batch] = MiniBatch(MacroBatch.ingest(items, 64), np.arange(len(items)), replace(cfg, micro_token_budget=512))
    frozen = [FrozenModel(tiny_model(), each) for each in (cfg, cpu_config(max_seq_len=64))]
    got, expected = (each.logps(batch).wait() for each in frozen)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("replays", [False, True])
def test_the_balance_loss_does_not_depend_on_the_split(replays):
    """The law: f_e and P_e are over all tokens of all samples of the mini-batch, a token that k
    samples share k times."""
    items = items_of(sampled(client_of(rounded(mixture()))))
    given = {"replay_routing": replays, "router_aux_coef": 3.0}
    expected, _, result = gradients(items, micro_token_budget=1024, merge_turns=False, **given)
    [stats] = result.micro_stats
    without, _, bare_result = gradients(items, micro_token_budget=1024, merge_turns=False, **{**given, "router_aux_coef": 0.0})
    assert max((without[name] - value).abs().max() for name, value in expected.items()) > 1e-2
    torch.testing.assert_close(result.loss, bare_result.loss + 3.0 * stats["router_aux_loss"])
    for layout in LAYOUTS:
        got, _, split = gradients(items, **{**layout, **given})
        assert_same_tensors(got, expected, atol=3e-5)
        torch.testing.assert_close(split.loss, result.loss, rtol=1e-5, atol=1e-6)
        counts = torch.stack([each["num_router_aux_loss"] for each in split.micro_stats])
        parts = torch.stack([each["router_aux_loss"] for each in split.micro_stats])
        torch.testing.assert_close((parts * counts).sum() / counts.sum(), stats["router_aux_loss"])


def test_the_balance_loss_of_one_padded_batch_is_the_classes_own():
    items = dialogues((1, 1, 1, 1), seed=3)
    model = mixture()
    cfg = cpu_config(micro_token_budget=512, router_aux_coef=1.0)
    [batch] = MiniBatch(MacroBatch.ingest(items, 32), np.arange(len(items)), cfg)
    keywords = {name: batch.tensors[name] for name in ("input_ids", "attention_mask")}
    own = model(**keywords, output_router_logits=True, use_cache=False).aux_loss
    _, _, result = gradients(items, model=model, micro_token_budget=512, replay_routing=False, router_aux_coef=1.0)
    torch.testing.assert_close(result.micro_stats[0]["router_aux_loss"], own.detach(), rtol=1e-5, atol=1e-6)


def test_checkpointing_keeps_the_gradient_of_the_balance_loss():
    items = items_of(sampled(client_of(rounded(mixture()))))
    expected, _, _ = gradients(items, router_aux_coef=2.0)
    model = mixture()
    enable_checkpointing(model)
    got, _, _ = gradients(items, model=model, router_aux_coef=2.0)
    assert_same_tensors(got, expected, atol=1e-6)


def test_a_batch_without_any_credit_has_no_balance_loss():
    """All samples are skipped; the row that stands for none counts nowhere."""
    items = [replace(each, weight=0.0) for each in items_of(sampled(client_of(mixture())))]
    model = mixture()
    cfg = cpu_config(max_seq_len=64, replay_routing=True, router_aux_coef=1.0)
    trainer = Trainer(model=model, algo=algo(), batch_source=ListSource(items), cfg=cfg)
    stats = trainer.train_step_sync()
    assert stats["train/loss"] == 0.0
    assert stats["train/grad_norm"] == 0.0


def test_a_dense_model_is_refused_before_the_first_batch():
    with pytest.raises(ConfigError, match=r"no router"):
        TorchBackend(tiny_model(), cpu_config(replay_routing=True), algo=algo())
