"""Conversations with images: their ids, the places of their images, and what is trained."""

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from image_spans import draw_picture, parts

from ludic.data.row_images import intern_row
from ludic.errors import DataError
from ludic.images.store import ImageStore, use_store
from ludic.inference.prompts.encoder import PromptEncoder
from ludic.inference.prompts.template import Dialogue
from ludic.models.images.small import TEMPLATE, make_image_tokenizer, make_small_image_config, make_small_processor
from ludic.training.batching.offline import make_chat_template_step_to_item
from ludic.training.samples.conversations import ChatTokenizer
from ludic.training.samples.preference import PreferenceItems
from ludic.training.samples.sft import SFTItems
from ludic.types import Rollout, Step

STORE = ImageStore()
DIGESTS = [STORE.add(draw_picture(seed).repeat(size, 0).repeat(size, 1)) for seed, size in enumerate((2, 4, 6))]
TOKENIZER = make_image_tokenizer()
SHAPE = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
PROCESSOR_CONFIG = make_small_image_config(TOKENIZER, **SHAPE)
PROCESSOR = make_small_processor(TOKENIZER, PROCESSOR_CONFIG)
PLACEHOLDER = PROCESSOR.placeholder_id
MARKED = TEMPLATE.replace(
    "{% if message.content is string %}{{ message.content }}",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<eos>{% endgeneration %}"
    "{% elif message.content is string %}{{ message.content }}",
).replace("{% if message.role == 'assistant' %}<eos>{% endif %}", "")


@pytest.fixture(autouse=True)
def store():
    with use_store(STORE):
        yield STORE


def marked_tokenizer():
    tokenizer = make_image_tokenizer()
    tokenizer.chat_template = MARKED
    make_small_processor(tokenizer, PROCESSOR_CONFIG)
    return tokenizer


TEXT = st.text("abc é", max_size=4)
CONTENT = TEXT | st.lists(TEXT | st.sampled_from(DIGESTS), min_size=1, max_size=4).map(lambda values: parts(*values))


@st.composite
def conversations(draw):
    messages = []
    for _ in range(draw(st.integers(1, 3))):
        messages += [
            {"role": "user", "content": draw(CONTENT)},
            {"role": "assistant", "content": draw(st.text("xyz", min_size=1, max_size=3))},
        ]
    return messages


def shown_digests(messages):
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part["image"][-32:] for content in contents for part in content if part["type"] == "image"]


def as_text(messages):
    """The same without its images."""
    join = lambda content: content if isinstance(content, str) else "".join(part.get("text", "") for part in content)  # noqa: E731
    return [{**message, "content": join(message["content"])} for message in messages]


@settings(max_examples=settings.default.max_examples // 2)
@given(messages=conversations(), turns=st.sampled_from(["all", "last", "each"]))
def test_images_are_placeholders_that_are_not_trained_and_text_is_masked_as_without_them(messages, turns):
    for tokenizer in (TOKENIZER, marked_tokenizer()):
        samples = ChatTokenizer(tokenizer, turns).tokenize(messages)
        plain = ChatTokenizer(tokenizer, turns).tokenize(as_text(messages))
        assert len(samples) == len(plain)
        for sample, text in zip(samples, plain, strict=True):
            is_image = np.zeros(len(sample.input_ids), dtype=bool)
            for digest, start, length in sample.images:
                assert sample.input_ids[start : start + length] == [PLACEHOLDER] * PROCESSOR.process(digest).num_placeholders
                is_image[start : start + length] = True
            ids, mask = np.array(sample.input_ids), np.array(sample.action_mask)
            assert (is_image == (ids == PLACEHOLDER)).all()
            assert not mask[is_image].any()
            kept = ~np.isin(
                ids, PROCESSOR.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"])
            )
            assert (ids[kept].tolist(), mask[kept].tolist()) == (text.input_ids, text.action_mask)
        if turns == "all":
            assert [span.digest for span in samples[0].images] == shown_digests(messages)


@settings(max_examples=settings.default.max_examples // 2)
@given(messages=conversations())
def test_a_prompt_has_the_ids_and_places_that_the_sampler_reads(messages):
    [sample] = ChatTokenizer(TOKENIZER, "last").tokenize(messages)
    prompt = PromptEncoder(TOKENIZER, PROCESSOR).encode(Dialogue(messages[:-1]))
    begin = sample.action_mask.index(1)
    bos = len(prompt.ids) - begin  # a conversation is rendered by the template alone
    assert prompt.ids[bos:] == sample.input_ids[:begin]
    assert [(digest, start - bos, length) for digest, start, length in prompt.images] == list(sample.images)


ROW = {"images": [f"ludic-image:{digest}" for digest in DIGESTS[:2]]}
ASKED = [*parts(DIGESTS[0], DIGESTS[1], "Equal?")]
FORMATS = {
    "messages": {"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "no"}]},
    "prompt_completion": {"prompt": "Equal?", "completion": "no"},
    "sharegpt": {"conversations": [{"from": "human", "value": "<image><image>Equal?"}, {"from": "gpt", "value": "no"}]},
    "sharegpt without markers": {"conversations": [{"from": "human", "value": "Equal?"}, {"from": "gpt", "value": "no"}]},
    "alpaca": {"instruction": "Equal?", "output": "no"},
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_gives_the_same_sample(name):
    row = intern_row({**FORMATS[name], **ROW}, None, "rows.jsonl, line 1")
    [item] = SFTItems(TOKENIZER).of_row(row, "rows.jsonl, line 1")
    [wanted] = ChatTokenizer(TOKENIZER).tokenize(FORMATS["messages"]["messages"])
    assert [span.digest for span in item.images] == DIGESTS[:2]
    assert (item.input_ids.tolist(), item.action_mask.tolist(), item.images) == (
        wanted.input_ids,
        wanted.action_mask,
        wanted.images,
    )
    [swapped] = SFTItems(TOKENIZER).of_row(
        intern_row({**FORMATS["prompt_completion"], "images": ROW["images"][::-1]}, None, "row 1"), "row 1"
    )
    assert [span.digest for span in swapped.images] == DIGESTS[1::-1]
    assert swapped.images[0].length != item.images[0].length


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_of_text_refuses_them_in_one_line(name):
    row = intern_row({**FORMATS[name], **ROW}, None, "rows.jsonl, line 1")
    with pytest.raises(DataError, match=r"^rows.jsonl, line 1 has images.* reads text alone"):
        SFTItems(make_image_tokenizer()).of_row(row, "rows.jsonl, line 1")


def test_text_that_spells_a_token_of_images_is_refused_with_its_row():
    for token in ("<|image_pad|>", "<|video_pad|>"):
        message = {"role": "user", "content": parts(DIGESTS[0], token)}
        with pytest.raises(DataError, match=r"^rows.jsonl, line 1: .*spells"):
            ChatTokenizer(TOKENIZER).tokenize([message, {"role": "assistant", "content": "a"}], where="rows.jsonl, line 1")


def test_a_rollout_keeps_its_images():
    trace = {"prompt_token_ids": [5, PLACEHOLDER, 6], "completion_token_ids": [7], "images": [[DIGESTS[0], 1, 1]]}
    row = {"id": "r", "steps": [{"prev_obs": parts(DIGESTS[0]), "action": "a", "reward": 1.0, "trace": trace}]}
    [item] = SFTItems(TOKENIZER).of_row(json.loads(json.dumps(row)), "row 1")
    assert item.images == ((DIGESTS[0], 1, 1),)


def test_a_step_without_a_trace_whose_messages_have_images_is_refused():
    step = Step(0, "a", "b", None, 0.0, False, True, {"chat_prompt_messages": [{"role": "user", "content": parts(DIGESTS[0])}]})
    with pytest.raises(DataError, match="reads text alone"):
        make_chat_template_step_to_item(make_image_tokenizer())(Rollout("r", [step]), step, 1.0)


@pytest.mark.parametrize(
    "prompt",
    ["Equal?", [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Equal?"}]}]],
)
def test_pairs_share_the_images_of_their_prompt(prompt):
    answers = {"chosen": "no", "rejected": "yes"}
    if isinstance(prompt, list):
        answers = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
    for given_prompt in ({"prompt": prompt}, {}):
        row = {**given_prompt, **answers, **ROW}
        if not given_prompt:
            if isinstance(prompt, str):
                continue
            row = {**ROW, **{name: [*prompt, *answer] for name, answer in answers.items()}}
        row = intern_row(row, None, "row 1")
        chosen, rejected = PreferenceItems(TOKENIZER).of_row(row, "row 1", pair_id=1)
        assert chosen.images == rejected.images
        assert [span.digest for span in chosen.images] == DIGESTS[:2]
        begin = chosen.action_mask.index(1)
        assert chosen.input_ids[:begin] == rejected.input_ids[:begin]
        short, _ = PreferenceItems(TOKENIZER, max_length=begin + 1).of_row(row, "row 1", pair_id=1)
        assert (len(short.input_ids), short.images) == (begin + 1, chosen.images)
        with pytest.raises(DataError, match=r"^row 1 has images.* reads text alone"):
            PreferenceItems(make_image_tokenizer()).of_row(row, "row 1", pair_id=1)


def test_an_image_behind_the_cut_is_left_out():
    shown = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Equal?"}]}
    answers = {name: [{"role": "assistant", "content": text}] for name, text in (("chosen", "no"), ("rejected", "yes"))}
    both = {name: [shown, *answer, shown, *answer] for name, answer in answers.items()}
    row = intern_row({**both, **ROW}, None, "row 1")
    chosen, _ = PreferenceItems(TOKENIZER).of_row(row, "row 1", pair_id=1)
    first, second = chosen.images
    for length, images in ((second.start, (first,)), (second.start + 1, (first, second))):
        cut, _ = PreferenceItems(TOKENIZER, max_length=length).of_row(row, "row 1", pair_id=1)
        assert (len(cut.input_ids), cut.images) == (length, images)
