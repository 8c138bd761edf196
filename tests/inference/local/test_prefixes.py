"""The prefix cache: later turns of an episode do not recompute earlier ones, and the results do not
change."""

import asyncio
import threading
from contextvars import copy_context
from itertools import pairwise
from random import Random

import accelerate
import pytest
import torch
from chat_tokenizers import bpe_tokenizer
from decoding import KINDS, LLAMA, assert_trainable, make_model
from hypothesis import given, settings, strategies as st
from peft import LoraConfig, get_peft_model
from playing import FOR_RL, Counting, play, protocol, tiny_model, tokenizer
from transformers import Phi3Config, Phi3ForCausalLM

from ludic.errors import ConfigError
from ludic.inference import ChatCompletionRequest, LocalChatClient, SamplingParams
from ludic.inference.client import Episode, current_episode, new_episode
from ludic.inference.local.decode import DecodeRequest, decode
from ludic.inference.local.prefixes import PrefixCache, _common_length
from ludic.models.byte_tokenizer import make_line_tokenizer
from ludic.training.rollouts.engine import RolloutEngine
from ludic.training.types import EnvSpec, ProtocolSpec, RolloutRequest

ROOM = 1 << 24


def fresh(rng, least=1, most=6):
    return [rng.randrange(2, 99) for _ in range(rng.randint(least, most))]


class Dialogues:
    """Episodes whose turns are decoded in common batches, some episodes less often than others."""

    def __init__(self, model, seed, *, episodes=5, room=ROOM):
        self.model, self.rng = model, Random(seed)
        self.prefixes = PrefixCache(room) if room else None
        self.episodes = [Episode() for _ in range(episodes)]
        self.texts = [fresh(self.rng, 2, 9) for _ in self.episodes]

    def turn(self, playing=None, eos_ids=frozenset({5, 17, 40})):
        """(requests, completions) of one batch. Each dialogue then continues with its answer and a
        new message."""
        playing = range(len(self.episodes)) if playing is None else playing
        requests = [
            DecodeRequest(
                list(self.texts[i]), SamplingParams(), limit=1 + self.rng.randrange(6), seed=i, episode=self.episodes[i]
            )
            for i in playing
        ]
        completions = decode(self.model, requests, eos_ids=eos_ids, pad_id=0, prefixes=self.prefixes)
        for i, completion in zip(playing, completions, strict=True):
            self.texts[i] += completion.token_ids + fresh(self.rng)
        return requests, completions


class TokensRead:
    """Counts the columns that the model processes, over all forward passes."""

    def __init__(self, model):
        self.columns = []
        model.register_forward_pre_hook(lambda _m, _a, given: self.columns.append(given["input_ids"].shape[1]), with_kwargs=True)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), turns=st.integers(2, 5))
def test_answers_equal_those_without_a_cache(seed, turns):
    model = make_model("Llama")
    known, plain, rng = Dialogues(model, seed), Dialogues(model, seed, room=0), Random(seed)
    for _ in range(turns):
        playing = sorted(rng.sample(range(5), rng.randint(1, 5)))
        requests, completions = known.turn(playing)
        _, expected = plain.turn(playing)
        assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
        for got, wanted in zip(completions, expected, strict=True):
            assert got.logprobs == pytest.approx(wanted.logprobs, abs=2e-5)
        assert_trainable(model, requests, completions)


@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_answers_as_without_a_cache(kind):
    model = make_model(kind)
    known, plain = Dialogues(model, 3), Dialogues(model, 3, room=0)
    for _ in range(4):
        assert [c.token_ids for c in known.turn()[1]] == [c.token_ids for c in plain.turn()[1]]
    assert (known.prefixes.nbytes > 0) == (kind == "Llama")


def test_a_second_turn_processes_only_new_tokens():
    model = make_model("Llama")
    episode, prefixes, read = Episode(), PrefixCache(ROOM), TokensRead(model)

    def ask(ids):
        read.columns.clear()
        asked = [DecodeRequest(ids, SamplingParams(temperature=0), limit=1, seed=0, episode=episode)]
        return decode(model, asked, eos_ids=frozenset(), pad_id=0, prefixes=prefixes)[0].token_ids

    first = ask([7, 8, 9, 10])
    assert read.columns == [4]
    ask([7, 8, 9, 10, *first, 20, 21])
    assert read.columns == [3]  # the last sampled token was never an input
    ask([7, 8, 9, 10, *first, 20, 22])
    assert read.columns == [1]  # all but the last token are cached
    ask([7, 8, 9, 10, *first, 20, 22])
    assert read.columns == [1]  # the last token is processed again for its logits
    ask([7, 30, 31, 32, 33])
    assert read.columns == [5]  # only a fifth is cached, too little to reuse


def change_in_place(model):
    with torch.no_grad():
        next(model.parameters()).add_(1.0)


def change_behind_the_counters(model):
    for parameter in model.parameters():
        parameter.data.mul_(1.1)


def take_an_optimizer_step(model):
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
    optimizer.step()


def load_others(model):
    torch.manual_seed(9)
    model.load_state_dict(type(model)(model.config).state_dict())


def adapted(names=("one",)):
    """Two layers with adapters, of which the first is active."""
    settings = LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False, lora_alpha=32)
    model = get_peft_model(make_model("Llama"), settings, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, settings)
    return model.eval()


@pytest.mark.parametrize("switch", ["disable_adapter_layers", "set_adapter", "merge_adapter", "scaling"])
def test_switching_adapters_invalidates_the_cache(switch):
    model = adapted(("one", "two"))
    dialogues = Dialogues(model, 1)
    dialogues.turn()
    if switch == "set_adapter":
        model.set_adapter("two")
        model.eval()
    elif switch == "scaling":
        for module in model.modules():
            if hasattr(module, "scaling") and isinstance(module.scaling, dict):
                module.scaling["one"] = 0.5
    else:
        getattr(model.base_model, switch)()
    assert_trainable(model, *dialogues.turn())


def test_weights_created_in_inference_mode_are_identified_by_their_values():
    with torch.inference_mode():
        model = make_model("Llama")
    dialogues = Dialogues(model, 1)
    dialogues.turn()
    assert dialogues.prefixes.nbytes > 0
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert_trainable(model, *dialogues.turn())


def test_answers_with_offloaded_weights_equal_those_without_a_cache(tmp_path):
    whole, offloaded = make_model("Llama"), make_model("Llama")
    accelerate.dispatch_model(
        offloaded, {"model": "cpu", "lm_head": "disk"}, offload_dir=str(tmp_path), main_device="cpu", force_hooks=True
    )
    known, plain = Dialogues(offloaded, 1), Dialogues(whole, 1, room=0)
    for _ in range(3):
        assert [c.token_ids for c in known.turn()[1]] == [c.token_ids for c in plain.turn()[1]]


@pytest.mark.parametrize("length", [12, 40])
def test_nothing_is_cached_with_length_dependent_position_embeddings(length):
    """Longrope rotates keys by different factors in short and in long dialogues."""
    factors = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    torch.manual_seed(0)
    model = Phi3ForCausalLM(
        Phi3Config(
            **LLAMA,
            pad_token_id=0,
            original_max_position_embeddings=16,
            rope_parameters={**factors, "original_max_position_embeddings": 16},
        )
    ).eval()
    known, plain = Dialogues(model, 2, episodes=1), Dialogues(model, 2, episodes=1, room=0)
    for dialogues in (known, plain):
        dialogues.texts = [list(range(20, 20 + length))]
    for _ in range(3):
        (got,), (wanted,) = known.turn()[1], plain.turn()[1]
        assert got.token_ids == wanted.token_ids
        assert got.logprobs == pytest.approx(wanted.logprobs, abs=2e-5)
    assert known.prefixes.nbytes == 0


@pytest.mark.parametrize("change", [change_in_place, change_behind_the_counters, take_an_optimizer_step, load_others])
def test_changed_weights_invalidate_the_cache(change):
    model = make_model("Llama")
    dialogues = Dialogues(model, 1)
    dialogues.turn()
    change(model)
    requests, completions = dialogues.turn()
    assert_trainable(model, requests, completions)


def test_unchanged_weights_keep_the_cache():
    model = make_model("Llama")
    prefixes = PrefixCache(ROOM)
    prefixes.clear_if_changed(model)
    episode = Episode()
    decode(
        model,
        [DecodeRequest([7, 8, 9], SamplingParams(), 2, 0, episode=episode)],
        eos_ids=frozenset(),
        pad_id=0,
        prefixes=prefixes,
    )
    prefixes.clear_if_changed(model)
    assert prefixes.longest_match(episode, [7, 8, 9, 10]).length == 3


def test_the_cache_of_an_episode_is_freed_at_its_end():
    dialogues = Dialogues(make_model("Llama"), 1)
    dialogues.turn()
    assert dialogues.prefixes.nbytes > 0
    dialogues.episodes[0].end()
    assert dialogues.prefixes.nbytes > 0
    for episode in dialogues.episodes[1:]:
        episode.end()
    assert dialogues.prefixes.nbytes == 0


def test_episodes_can_end_while_another_thread_uses_the_cache():
    dialogues = Dialogues(make_model("Llama"), 2, episodes=1)
    dialogues.turn()
    prefixes = dialogues.prefixes
    (kept,) = prefixes._prefixes[dialogues.episodes[0]]
    dialogues.episodes[0].end()
    prefixes.max_bytes = 0
    episodes, faults = [Episode() for _ in range(3000)], []

    def decoding():
        try:
            for i, episode in enumerate(episodes):
                prefixes.add(episode, kept)
                if i % 3 == 0:
                    prefixes.shrink()
        except Exception as fault:
            faults.append(fault)

    thread = threading.Thread(target=decoding)
    thread.start()
    for episode in episodes:
        episode.end()
    thread.join(60)
    assert not thread.is_alive()
    assert faults == []
    assert list(prefixes._prefixes) == []


def test_the_cache_stays_within_its_size_and_evicts_the_oldest_entry():
    model = make_model("Llama")
    one = 2 * 2 * 2 * 8 * 4  # bytes of one token: layers, keys and values, heads, head size, bytes per number
    prefixes = PrefixCache(10 * one)
    episodes = [Episode() for _ in range(3)]

    def read(episode, ids):
        asked = [DecodeRequest(ids, SamplingParams(), 1, 0, episode=episode)]
        decode(model, asked, eos_ids=frozenset(), pad_id=0, prefixes=prefixes)

    read(episodes[0], [7, 8, 9, 10])
    read(episodes[1], [7, 8, 9, 10])
    assert prefixes.nbytes == 8 * one
    read(episodes[2], [7, 8, 9, 10])
    assert prefixes.nbytes == 8 * one
    assert [prefixes.longest_match(e, [7, 8, 9, 10, 11]) is not None for e in episodes] == [False, True, True]
    read(episodes[0], [7] * 11)  # more than the cache may hold
    assert prefixes.longest_match(episodes[0], [7] * 12) is None


def test_two_dialogues_of_one_episode_are_both_cached():
    model, prefixes, episode = make_model("Llama"), PrefixCache(ROOM), Episode()
    for ids in ([7, 8, 9], [20, 21, 22]):
        asked = [DecodeRequest(ids, SamplingParams(temperature=0), 1, 0, episode=episode)]
        decode(model, asked, eos_ids=frozenset(), pad_id=0, prefixes=prefixes)
    assert [prefixes.longest_match(episode, [*ids, 50]).length for ids in ([7, 8, 9], [20, 21, 22])] == [3, 3]
    assert prefixes.longest_match(Episode(), [7, 8, 9, 50]) is None


@given(a=st.lists(st.integers(0, 2), max_size=6), b=st.lists(st.integers(0, 2), max_size=6))
def test_the_length_of_the_common_prefix(a, b):
    length = _common_length(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]


def test_the_episode_is_that_of_the_running_task():
    async def play():
        with new_episode() as mine:
            inner = asyncio.create_task(ask())
            return mine, current_episode(), await inner

    async def ask():
        return current_episode()

    async def two():
        return await asyncio.gather(play(), play())

    (a, a_now, a_inner), (b, b_now, b_inner) = asyncio.run(two())
    assert a is a_now is a_inner
    assert b is b_now is b_inner
    assert a is not b
    assert current_episode() is None


def play_episodes(client, *, seed=0, episodes=12):
    """Tokens and log-probabilities of every turn of the episodes that an engine plays."""
    engine = RolloutEngine(
        env_registry={"count": lambda: Counting(goal=4)},
        protocol_registry={"one": lambda: protocol(client, reject_incomplete_completions=False)},
    )
    asked = [
        RolloutRequest(
            env=EnvSpec(kind="count"), protocol=ProtocolSpec(kind="one"), sampling_seed=seed + i, env_seed=i, inference=FOR_RL
        )
        for i in range(episodes)
    ]
    rollouts = play(engine.generate_rollouts(requests=asked, max_steps=4))
    return [
        [(s.trace.prompt_token_ids, s.trace.completion_token_ids, s.trace.completion_logprobs) for s in r.steps] for r in rollouts
    ]


@pytest.mark.parametrize("make", [make_line_tokenizer, bpe_tokenizer])
def test_episodes_of_an_engine_are_equal_and_process_fewer_tokens(make):
    """Also with a vocabulary in which a sampled text has many spellings: turns begin with the
    sampled ids."""
    chat = make()
    model = tiny_model(vocab_size=len(chat), eos_token_id=chat.eos_token_id, max_position_embeddings=256)
    with_cache, without = LocalChatClient(model, chat), LocalChatClient(model, chat, prefix_cache_bytes=0)
    read = TokensRead(model)
    expected = play_episodes(without)
    whole = sum(read.columns)
    read.columns.clear()
    got = play_episodes(with_cache)
    assert sum(read.columns) < 0.7 * whole
    for mine, other in zip(got, expected, strict=True):
        assert [turn[:2] for turn in mine] == [turn[:2] for turn in other]
        for before, after in pairwise(mine):
            assert after[0][: len(before[0]) + len(before[1])] == [*before[0], *before[1]]
        for (*_, a), (*_, b) in zip(mine, other, strict=True):
            assert a == pytest.approx(b, abs=1e-4)
    assert with_cache._prefixes.nbytes == 0  # the episodes have ended


def test_the_cache_is_freed_at_the_end_of_the_episode_despite_other_references():
    model, prefixes = make_model("Llama"), PrefixCache(ROOM)
    with new_episode() as episode:
        decode(
            model,
            [DecodeRequest([7, 8, 9], SamplingParams(), 2, 0, episode=episode)],
            eos_ids=frozenset(),
            pad_id=0,
            prefixes=prefixes,
        )
        assert prefixes.nbytes > 0
    assert prefixes.nbytes == 0
    late = [DecodeRequest([7, 8, 9], SamplingParams(), 2, 0, episode=episode)]  # its batch ended after it was cancelled
    decode(model, late, eos_ids=frozenset(), pad_id=0, prefixes=prefixes)
    assert prefixes.nbytes == 0


def test_publishing_weights_clears_the_cache():
    model = tiny_model()
    client = LocalChatClient(model, tokenizer(), copy_model=True)
    with new_episode() as episode:
        request = ChatCompletionRequest(
            model="m", messages=[{"role": "user", "content": "abc"}], sampling=FOR_RL.sampling, seed=0
        )
        play(client.complete(request))
        assert client._prefixes.nbytes > 0
        client.sync_weights({name: tensor.clone() for name, tensor in model.state_dict().items()})
        assert client._prefixes.longest_match(episode, [1, 2, 3]) is None
        assert client._prefixes.nbytes == 0


def test_a_negative_cache_size_is_refused():
    with pytest.raises(ConfigError, match="prefix_cache_bytes"):
        LocalChatClient(tiny_model(), None, prefix_cache_bytes=-1)


def test_closing_the_coroutine_in_another_context_ends_the_episode():
    ended = []

    async def episode():
        with new_episode() as mine:
            mine.on_end(ended.append)
            await asyncio.sleep(0)

    playing = episode()
    copy_context().run(playing.send, None)
    with pytest.raises(ValueError, match="different Context"):
        playing.close()
    assert len(ended) == 1
