"""A sampler in process reads prompts with images as the trainer does, whatever else is in the
batch, and continues dialogues with them from cached keys and values."""

import asyncio

import pytest
import torch
import transformers
from image_samples import Sample, make_sample, read_alone
from tiny_vision import CONFIGS, IMAGE, VIDEO, make_picture, make_tiny_vision

from ludic.errors import ConfigError, DataError, InferenceError
from ludic.images.content import image_part
from ludic.inference import ChatCompletionRequest, LocalChatClient, ReturnSpec, SamplingParams
from ludic.inference.client import Episode, new_episode
from ludic.inference.local import decode as decode_module, images as images_module, row_cache
from ludic.inference.local.decode import DecodeRequest, decode
from ludic.inference.local.prefixes import PrefixCache
from ludic.inference.local.sampler import Sampler, stream_key
from ludic.inference.prompts.template import ChatTemplate
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.types import ImageSpan

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # GLM-4V's processor
CLASSES = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "llava", "llava_next", "smolvlm", "idefics3", "internvl", "mistral3",
    "gemma3", "gemma3_wide", "lfm2_vl",
)  # fmt: skip


def make_prompts(processor):
    """Prompts without an image, with one, with two, and with another one of equal size."""
    first, other = (processor.store.add(make_picture(32, 32, seed=seed)) for seed in (1, 2))
    second = processor.store.add(make_picture(32, 16, seed=3))
    parts = [
        ["Nothing to see"],
        ["Look at this: ", first, " and say what it shows."],
        ["compare ", second, " with ", first, "!"],
        ["Look at this: ", other, " and say what it shows."],
        ["Look at this: ", first, " and say what it shows."],
    ]
    return [make_sample(processor, each, []) for each in parts]


def ask(prompt, *, seed=0, limit=6, episode=None, **settings):
    sampling = SamplingParams(**{"temperature": 1.0, **settings})
    return DecodeRequest(prompt.ids, sampling, limit, seed, episode=episode, images=prompt.spans)


def answered(prompt, tokens):
    """The prompt and its answer, as transformers reads it."""
    inputs = {**prompt.inputs, "input_ids": torch.tensor([prompt.ids + tokens])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for name in {"token_type_ids", "mm_token_type_ids"} & inputs.keys():
        inputs[name] = torch.nn.functional.pad(prompt.inputs[name], (0, len(tokens)))
    return Sample(prompt.ids + tokens, prompt.spans, inputs)


def read_answer(model, prompt, tokens):
    """[C] log-probabilities of the answer by transformers' own path, alone in its pass."""
    return read_alone(model, answered(prompt, tokens))[len(prompt.ids) - 1 :]


def run(model, requests, **settings):
    return decode(model, requests, eos_ids=frozenset({2}), pad_id=0, **settings)


@pytest.mark.parametrize("name", CLASSES)
def test_sampled_log_probabilities_are_those_of_transformers(name):
    model, processor = make_tiny_vision(name)
    prompts = make_prompts(processor)
    settings = [{"temperature": 0.0}, {}, {}, {"top_p": 0.8}, {"temperature": 0.0}]
    completions = run(model, [ask(prompt, **each) for prompt, each in zip(prompts, settings, strict=True)])
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = read_answer(model, prompt, completion.token_ids)
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    one, other = (read_alone(model, answered(prompts[number], completions[1].token_ids)) for number in (1, 3))
    assert float((one - other).abs().max()) >= 0.1


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "llava"])
def test_answers_to_one_prompt_share_the_keys_and_values_of_its_images(name, monkeypatch):
    model, processor = make_tiny_vision(name)
    prompts = make_prompts(processor)
    monkeypatch.setattr(decode_module, "LEAST_SHARED_TOKENS", 1)
    calls, attend_rows = [], row_cache.attend_rows
    monkeypatch.setattr(row_cache, "attend_rows", lambda *given: calls.append(1) or attend_rows(*given))
    asked = [(prompt, seed) for prompt in prompts[:4] for seed in range(3)]
    completions = run(model, [ask(prompt, seed=seed) for prompt, seed in asked])
    assert len(calls) == 5 * 2  # tokens after the first of each answer, layers
    for (prompt, _), completion in zip(asked, completions, strict=True):
        expected = read_answer(model, prompt, completion.token_ids)
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5", "smolvlm", "gemma3"])
def test_equal_seeds_give_equal_tokens_in_any_batch(name):
    model, processor = make_tiny_vision(name)
    requests = [ask(prompt, seed=seed, limit=4 + seed) for prompt in make_prompts(processor)[:4] for seed in range(2)]
    together = [completion.token_ids for completion in run(model, requests)]
    assert [run(model, [request])[0].token_ids for request in requests] == together
    assert [completion.token_ids for completion in run(model, requests[::-1])][::-1] == together
    assert len(set(map(tuple, together))) == len(together)


def test_streams_of_text_are_as_ever_and_those_of_images_their_own():
    assert stream_key(7, [1, 2, 3]).tolist() == [7, 13041116711478803063]
    one, other = ImageSpan("0" * 32, 0, 1), ImageSpan("1" * 32, 1, 1)
    shown = [(), (one,), (other,), (one, other), (other, one)]
    assert len({stream_key(7, [1, 2, 3], spans).tobytes() for spans in shown}) == 5


def make_open_model(name):
    """A model whose layers all have the keys and values of every token, so that rows of its cache
    can be separated: without windows."""
    config = {**CONFIGS[name], "text_config": {**CONFIGS[name]["text_config"], "sliding_window": None}}
    if name == "gemma3":
        config["text_config"] |= {"layer_types": ["full_attention"] * 4, "sliding_window": 8}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, name, config)
        return make_tiny_vision(name)


class Reads:
    """Counts the tokens of each row that a model reads, in all of its passes."""

    def __init__(self, model):
        self.widths = []
        model.register_forward_pre_hook(lambda _m, _a, given: self.widths.append(given["input_ids"].shape[1]), with_kwargs=True)

    def take(self):
        widths, self.widths[:] = list(self.widths), []
        return widths


def extend(processor, prompt, tokens, parts):
    """The next turn: the prompt, its answer, and new parts."""
    more = make_sample(processor, parts, [])
    spans = tuple(span._replace(start=span.start + len(prompt.ids) + len(tokens)) for span in more.spans)
    return Sample([*prompt.ids, *tokens, *more.ids], (*prompt.spans, *spans), {})


OPEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "llava", "llava_next", "smolvlm", "idefics3", "internvl", "mistral3")


@pytest.mark.parametrize("name", [*OPEN, "gemma3"])
def test_turns_with_images_continue_from_the_cache_as_without_one(name):
    model, processor = make_open_model(name)
    first, second, third = (processor.store.add(make_picture(*size, seed=9)) for size in ((32, 32), (32, 16), (24, 24)))
    prefixes, reads = PrefixCache(1 << 24), Reads(model)
    episodes = [Episode(), Episode()]
    prompts = [make_sample(processor, parts, []) for parts in (["It is big: ", first, "!"], ["Hello, how are you today?"])]
    later = [[second, " and now?"], [" and in words?"], [third, " or", first]]
    for turn, parts in enumerate([None, *later]):
        requests = [ask(prompt, seed=turn, episode=episode) for prompt, episode in zip(prompts, episodes, strict=True)]
        cached = run(model, requests, prefixes=prefixes)
        widths = reads.take()
        plain = run(model, requests)
        reads.take()
        for one, other in zip(cached, plain, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        if parts is not None:
            brings_image = any(map(processor.store.has, parts))
            is_whole = max(widths) == max(len(prompt.ids) for prompt in prompts)
            assert is_whole == (name == "gemma3" and brings_image)
        if turn < len(later):
            prompts = [
                extend(processor, prompt, each.token_ids, later[turn]) for prompt, each in zip(prompts, cached, strict=True)
            ]
    assert prefixes.nbytes > 0


def test_a_cached_prompt_is_not_that_of_another_image_of_equal_size():
    model, processor = make_tiny_vision("qwen2_vl")
    prompts, prefixes, episode, reads = make_prompts(processor), PrefixCache(1 << 24), Episode(), Reads(model)
    asked = [ask(prompts[number], episode=episode) for number in (1, 3, 3)]
    found = [run(model, [request], prefixes=prefixes)[0] for request in asked]
    assert [completion.token_ids for completion in found] == [run(model, [request])[0].token_ids for request in asked]
    assert [width for width in reads.take() if width > 1][:3] == [len(prompts[1].ids), len(prompts[3].ids), len(prompts[1].ids)]


def test_a_cached_prefix_ends_in_no_image():
    model, processor = make_tiny_vision("llava")
    digest = processor.store.add(make_picture(16, 16))
    prompt = make_sample(processor, ["a few words before the image ends it ", digest], [])
    prefixes, episode, reads = PrefixCache(1 << 24), Episode(), Reads(model)
    [first] = run(model, [ask(prompt, limit=1, episode=episode)], prefixes=prefixes)
    [again] = run(model, [ask(prompt, limit=1, episode=episode)], prefixes=prefixes)
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-5)
    assert reads.take() == [len(prompt.ids), 16]  # all of the image, and not its last token alone


def test_features_are_computed_once_until_the_weights_change(monkeypatch):
    model, processor = make_tiny_vision("qwen2_vl")
    prompts, prefixes, encoded = make_prompts(processor), PrefixCache(1 << 24), []
    encode = images_module.encode_images
    monkeypatch.setattr(images_module, "encode_images", lambda *given: encoded.append(len(given[1])) or encode(*given))
    run(model, [ask(prompt, seed=seed) for prompt in prompts for seed in range(2)], prefixes=prefixes)
    assert encoded == [3]  # in one pass
    run(model, [ask(prompts[1])], prefixes=prefixes)
    assert encoded == [3]
    with torch.no_grad():
        model.model.visual.patch_embed.proj.weight.mul_(1.1)
    [changed] = run(model, [ask(prompts[1])], prefixes=prefixes)
    assert encoded == [3, 1]
    assert changed.logprobs == pytest.approx(read_answer(model, prompts[1], changed.token_ids).tolist(), abs=1e-4)
    prefixes.clear()
    monkeypatch.setattr(images_module, "PASS_PATCHES", 32)  # an image of 32 x 32 pixels has 64
    run(model, [ask(prompt) for prompt in prompts], prefixes=prefixes)
    assert encoded[2:] == [1, 1, 1]
    assert len(prefixes.features) == 3
    prefixes.max_bytes = 1
    run(model, [ask(prompt) for prompt in prompts], prefixes=prefixes)
    assert prefixes.features == {}


def test_the_features_that_were_used_last_are_kept():
    model, processor = make_tiny_vision("qwen2_vl")
    prompts, prefixes = make_prompts(processor), PrefixCache(1 << 24)
    run(model, [ask(prompt) for prompt in prompts], prefixes=prefixes)
    run(model, [ask(prompts[1])], prefixes=prefixes)
    used = prompts[1].spans[0].digest
    prefixes.max_bytes = sum(tensor.nbytes for tensor in prefixes.features[used].tensors)
    prefixes.shrink()
    assert list(prefixes.features) == [used]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"min_p": 0.1, "top_k": 3, "temperature": 2.0}])
def test_a_favoured_placeholder_is_never_drawn(settings):
    torch.manual_seed(0)
    logits = torch.randn(500, 300)
    logits[:, [IMAGE, VIDEO]] += 20
    params = SamplingParams(**{"temperature": 1.0, **settings})
    keys = [stream_key(seed, [5]) for seed in range(len(logits))]
    sampler = Sampler([params] * len(logits), keys, logits.device, keep_candidates=True, banned_ids=(IMAGE, VIDEO))
    for position in range(20):
        tokens, raw, drawn = sampler.draw(logits, position)
        assert not {IMAGE, VIDEO} & set(tokens.tolist())
        places = tokens[:, None]
        assert torch.allclose(raw, torch.log_softmax(logits, dim=1).gather(1, places)[:, 0], atol=1e-5)
        assert float(raw.max()) < -10
        if not settings:
            allowed = logits.index_fill(1, torch.tensor([IMAGE, VIDEO]), -torch.inf)
            assert torch.allclose(drawn, torch.log_softmax(allowed, dim=1).gather(1, places)[:, 0], atol=1e-5)
            assert sampler.candidates == [[]] * len(logits)
        assert not any({IMAGE, VIDEO} & set(kept) for kept in sampler.candidates)


def test_a_model_that_favours_placeholders_draws_none():
    model, processor = make_tiny_vision("qwen2_vl")
    model.lm_head.register_forward_hook(
        lambda _m, _given, logits: logits.index_add(
            2, torch.tensor([IMAGE, VIDEO]), logits.new_full((*logits.shape[:2], 2), 30.0)
        )
    )
    prompts = make_prompts(processor)
    completions = run(model, [ask(prompts[seed % 5], seed=seed, limit=80) for seed in range(160)])
    drawn = [token for completion in completions for token in completion.token_ids]
    assert len(drawn) >= 10_000
    assert not {IMAGE, VIDEO} & set(drawn)
    assert max(logp for completion in completions for logp in completion.logprobs) < -10


def make_client(name="qwen2_vl", **settings):
    model, processor = make_tiny_vision(name)
    return LocalChatClient(model, processor.tokenizer, **settings), processor


def chat(client, *contents, seed=0, **settings):
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": content} for i, content in enumerate(contents)]
    sampling = SamplingParams(**{"temperature": 1.0, "max_tokens": 5, **settings})
    return client.complete(ChatCompletionRequest("m", messages, sampling, ReturnSpec.for_rl(), seed))


@pytest.mark.parametrize("copied", [False, True])
def test_a_client_answers_messages_with_images(copied):
    client, processor = make_client(copy_model=copied)
    picture, question = make_picture(32, 32, seed=1), {"type": "text", "text": "What is it?"}
    digest = processor.store.add(picture)

    async def both():
        given = [{"type": "image", "image": picture}, question]
        return await asyncio.gather(chat(client, given), chat(client, [image_part(digest), question]), chat(client, "Hi"))

    (one, _), (other, _), (text, _) = asyncio.run(both())
    assert one.prompt_token_ids == other.prompt_token_ids
    assert one.completion_token_ids == other.completion_token_ids
    assert (one.images, text.images) == ((ImageSpan(digest, one.prompt_token_ids.index(IMAGE), 16),), ())
    assert one.to_trace().images == one.images
    before, after = (
        ChatTemplate(processor.tokenizer).render([{"role": "user", "content": [image_part(digest), question]}]).split("<image>")
    )
    prompt = make_sample(processor, [before, digest, after], [])
    assert one.prompt_token_ids == prompt.ids
    expected = read_answer(client.model, prompt, one.completion_token_ids)
    assert one.completion_logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_later_turns_of_an_episode_begin_with_what_was_read_and_sampled():
    client, processor = make_client()
    first, second = (image_part(processor.store.add(make_picture(32, 16, seed=seed))) for seed in (1, 2))
    reads, question = Reads(client.model), {"type": "text", "text": "What do you see in this picture?"}

    async def play():
        with new_episode():
            one, _ = await chat(client, [first, question])
            reads.take()
            two, _ = await chat(client, [first, question], one.text, [second, {"type": "text", "text": "And now?"}])
        return one, two, reads.take()[0]

    one, two, width = asyncio.run(play())
    known = [*one.prompt_token_ids, *one.completion_token_ids]
    assert two.prompt_token_ids[: len(known)] == known
    assert two.images[:1] == one.images
    assert len(two.images) == 2
    assert width == len(two.prompt_token_ids) - len(known) + 1


def test_bad_images_fail_alone():
    client, processor = make_client()
    prompt = make_prompts(processor)[1]
    [span] = prompt.spans

    async def ask_all():
        sampling = SamplingParams(temperature=0, max_tokens=3)

        def tokens(ids, images=()):
            return client.complete_tokens(ids, sampling=sampling, images=images)

        asked = [
            tokens(prompt.ids, prompt.spans),
            tokens(prompt.ids),
            tokens(prompt.ids, [span._replace(start=span.start + 1)]),
            tokens([70, 71], [span]),
            tokens(prompt.ids, [span._replace(digest="0" * 32)]),
            chat(client, "it spells <image>"),
            tokens([*prompt.ids, *[70] * 1024], prompt.spans),
        ]
        return await asyncio.gather(*asked, return_exceptions=True)

    fine, *errors = asyncio.run(ask_all())
    assert fine.images == prompt.spans
    assert fine.completion_logprobs == pytest.approx(
        read_answer(client.model, prompt, fine.completion_token_ids).tolist(), abs=1e-4
    )
    expected = [
        (ConfigError, "16 placeholders for the 0 features of 0 images"),
        (ConfigError, f"start={span.start + 1}"),
        (ConfigError, "0 placeholders for the 16 features"),
        (DataError, "0" * 32),
        (DataError, "spells '<image>'"),
        (InferenceError, "16 of its tokens are 1 images"),
    ]
    for error, (kind, words) in zip(errors, expected, strict=True):
        assert isinstance(error, kind)
        assert words in str(error)


def test_a_model_of_text_refuses_images():
    config = transformers.Qwen2Config(
        vocab_size=262, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    client = LocalChatClient(transformers.Qwen2ForCausalLM(config), make_byte_tokenizer())
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM reads text alone"):
        asyncio.run(chat(client, [image_part("0" * 32)]))
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM reads text alone"):
        asyncio.run(client.complete_tokens([5], images=[ImageSpan("0" * 32, 0, 1)]))


def test_the_context_is_that_of_the_text_model():
    client, _ = make_client()
    assert client.context_length == 1024
    with pytest.raises(InferenceError, match=r"context 1024; shorten it"):
        asyncio.run(client.complete_tokens([70] * 1024))


def test_weights_that_are_synced_drop_the_features():
    client, processor = make_client(copy_model=True)
    prompt = make_prompts(processor)[1]
    name = "model.visual.patch_embed.proj.weight"
    sampling = SamplingParams(temperature=1, max_tokens=3)
    asyncio.run(client.complete_tokens(prompt.ids, sampling=sampling, seed=1, images=prompt.spans))
    assert client._prefixes.features
    client.sync_weights({name: client.model.state_dict()[name] * 1.5})
    assert not client._prefixes.features
    trace = asyncio.run(client.complete_tokens(prompt.ids, sampling=sampling, seed=1, images=prompt.spans))
    expected = read_answer(client.model, prompt, trace.completion_token_ids)
    assert trace.completion_logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_text_is_sampled_by_counted_positions_after_the_model_has_generated_from_an_image():
    model, processor = make_tiny_vision("qwen2_vl")
    prompts = make_prompts(processor)
    request = ask(prompts[0], temperature=0.0)
    [before] = run(model, [request])
    read_alone(model, prompts[2])  # the model remembers how far these positions were from their places
    [after] = run(model, [request])
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-6)


def test_prompts_are_shared_by_the_language_model_alone():
    model, _ = make_tiny_vision("qwen2_vl")
    model.config.vision_config._attn_implementation = "eager"

    def kinds():
        return model.config.text_config._attn_implementation, model.config.vision_config._attn_implementation

    with row_cache.shareable_attention(model):
        assert kinds() == (row_cache.SHARED_PROMPTS, "eager")
    assert kinds() == ("sdpa", "eager")
