"""Prompts with images: the ids of the model's own processor, and the places of the images in them,
in dialogues of several turns too."""

from functools import cache
from types import SimpleNamespace

import pytest
from chat_tokenizers import CHATML
from hypothesis import given, settings, strategies as st
from tiny_vision import EXACT, make_picture, make_tiny_vision

from ludic.errors import ConfigError, DataError
from ludic.images.content import find_message_digests, image_part
from ludic.inference.client import Episode, Sampled
from ludic.inference.prompts.encoder import PromptEncoder
from ludic.inference.prompts.images import check_texts, expand_markers, find_spans, shorten_prompt
from ludic.inference.prompts.template import ChatTemplate, Dialogue
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.models.images.processor import ImageProcessor
from ludic.types import ImageSpan, TokenTrace

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # GLM-4V's processor
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<start><image><end>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAVA = (
    "{% for message in messages %}{{ message['role'].upper() + ': '}}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""Of llava-1.5, in short: it shows no content that is text."""


def user(*parts):
    return {"role": "user", "content": [image_part(part) if len(part) == 32 else text_part(part) for part in parts]}


def text_part(text):
    return {"type": "text", "text": text}


def make_bpe_tokenizer(texts=()):
    """A BPE tokenizer that merges across words, with the special tokens of the tiny models."""
    from tiny_vision import EXTRA
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>", *EXTRA],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(
        ["how many cats are in the picture?\n", "user\nhow many", "it is the same picture\n"] * 50 + list(texts), trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<eos>", clean_up_tokenization_spaces=False
    )


def make_processor(*, template=PARTS, bpe=False):
    """The processor of the tiny Qwen2-VL over bytes, or over another vocabulary, with four pictures
    in its store; the first two are of equal size."""
    model, processor = make_tiny_vision("qwen2_vl")
    tokenizer = make_bpe_tokenizer() if bpe else processor.tokenizer
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    tokenizer.image_token, tokenizer.video_token = "<image>", "<video>"
    tokenizer.image_token_id, tokenizer.video_token_id = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
    model.config.image_token_id, model.config.video_token_id = tokenizer.image_token_id, tokenizer.video_token_id
    own = processor.processor
    own = type(own)(image_processor=own.image_processor, tokenizer=tokenizer, video_processor=own.video_processor)
    processor = ImageProcessor(own, model.config, processor.store)
    sizes = ((16, 16), (16, 16), (32, 16), (24, 40))
    return processor, [processor.store.add(make_picture(*size, seed=seed)) for seed, size in enumerate(sizes)]


def encode(processor, messages, **settings):
    return PromptEncoder(processor.tokenizer, processor, **settings).encode(Dialogue(messages))


@pytest.mark.parametrize("name", [*EXACT, "gemma3", "lfm2_vl"])
def test_ids_are_those_of_the_processor_for_the_rendered_text(name):
    _, processor = make_tiny_vision(name)
    digests = [processor.store.add(make_picture(*size, seed=seed)) for seed, size in enumerate(((32, 32), (32, 16)))]
    digests = digests[:1] if name == "llava_onevision" else digests  # it reads an image among others as another one
    messages = [{"role": "system", "content": "Look."}, user("What is ", digests[0], "?", *digests[1:])]
    prompt = encode(processor, messages)
    text = ChatTemplate(processor.tokenizer).render(messages)
    images = [processor.store.open(digest) for digest in digests]
    made = processor.processor(text=[text], images=[images], return_tensors="pt")["input_ids"][0].tolist()
    assert prompt.ids == made
    assert [span.digest for span in prompt.images] == digests
    for digest, start, length in prompt.images:
        inside = prompt.ids[start : start + length]
        assert inside[0] == inside[-1] == processor.placeholder_id
        assert inside.count(processor.placeholder_id) == processor.process(digest).num_placeholders


@pytest.mark.parametrize("name", [*EXACT, "gemma3", "lfm2_vl"])
def test_a_server_gets_the_ids_of_the_text_with_one_marker_for_each_image(name):
    _, processor = make_tiny_vision(name)
    digests = [processor.store.add(make_picture(*size, seed=seed)) for seed, size in enumerate(((32, 32), (32, 16)))]
    digests = digests[:1] if name == "llava_onevision" else digests
    messages = [{"role": "system", "content": "Look."}, user("What is ", digests[0], "?", *digests[1:])]
    prompt = encode(processor, messages)
    text = ChatTemplate(processor.tokenizer).render(messages)
    assert shorten_prompt(prompt.ids, prompt.images, processor) == processor.tokenizer(text)["input_ids"]


@pytest.mark.parametrize("text", ["user\n<image>\nhow", "<image><image><image>", "a<image>\n<image> <image>", "<image>"])
def test_text_around_an_image_may_share_a_token_with_the_text_or_the_image_beside_it(text):
    """As the blank lines of Gemma3: three lines are one token here, and four, five."""
    tokenizer = make_bpe_tokenizer([lines * "\n" for lines in (3, 4, 5)] * 50)
    block = f"\n\n<start>{3 * '<image>'}<end>\n\n"
    processor = SimpleNamespace(
        tokenizer=tokenizer,
        marker="<image>",
        placeholder_id=tokenizer.convert_tokens_to_ids("<image>"),
        process=lambda _: SimpleNamespace(block=block),
    )
    ids = tokenizer(text.replace("<image>", block))["input_ids"]
    assert all(len(tokenizer(lines * "\n")["input_ids"]) == 1 for lines in (3, 4, 5))
    first = [place for place, token in enumerate(ids) if token == processor.placeholder_id][::3]
    spans = [ImageSpan("0" * 32, place, 3) for place in first]
    assert shorten_prompt(ids, spans, processor) == tokenizer(text)["input_ids"]


def test_images_of_equal_size_have_equal_ids_and_other_spans():
    processor, (first, second, *_) = make_processor()
    encoder = PromptEncoder(processor.tokenizer, processor)
    asked = [Dialogue([user(digest, "How many?")]) for digest in (first, second, first)]
    one, other, again = encoder.encode_batch([(dialogue, None) for dialogue in asked])
    assert one.ids == other.ids
    assert [one.images[0].digest, other.images[0].digest] == [first, second]
    for known in (again, encoder.encode(asked[0])):  # of the same batch, and from the cache
        assert (known.ids, known.images) == (one.ids, one.images)


@pytest.mark.parametrize("bpe", [False, True])
def test_a_span_is_found_by_hand(bpe):
    processor, (first, _, wide, _) = make_processor(bpe=bpe)
    prompt = encode(processor, [user("Is ", first, wide)])
    image, start, end = processor.tokenizer.convert_tokens_to_ids(["<image>", "<start>", "<end>"])
    before = prompt.ids.index(start)
    assert prompt.ids[before:][:15] == [
        start,
        *[image] * 4,
        end,
        start,
        *[image] * 8,
    ]  # 16 x 16 and 32 x 16 pixels, 8 x 8 for each
    assert prompt.images == (ImageSpan(first, before + 1, 4), ImageSpan(wide, before + 7, 8))


@cache
def known_processor(bpe):
    return make_processor(bpe=bpe)


TEXTS = st.text("ab \n?é", max_size=6)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), bpe=st.booleans())
def test_a_turn_begins_with_the_ids_and_spans_that_were_read_and_sampled(data, bpe):
    processor, digests = known_processor(bpe)
    encoder, episode, tokenizer = PromptEncoder(processor.tokenizer, processor), Episode(), processor.tokenizer
    end, sampled_ids = tokenizer.convert_tokens_to_ids("<|im_end|>"), st.lists(st.integers(3, 250), max_size=5)
    messages, known_ids, known_spans = [], [], ()
    for _ in range(data.draw(st.integers(2, 4))):
        parts = st.lists(st.sampled_from(digests) | TEXTS, min_size=1, max_size=4)
        messages.append(user(*data.draw(parts)))
        prompt = encoder.encode(Dialogue(messages), episode)
        assert prompt.ids[: len(known_ids)] == known_ids
        assert prompt.images[: len(known_spans)] == known_spans
        assert [span.digest for span in prompt.images] == find_message_digests(messages)
        assert find_spans(prompt.ids, [span.digest for span in prompt.images], processor) == prompt.images
        counts = iter([span.length for span in prompt.images])
        short = shorten_prompt(prompt.ids, prompt.images, processor)
        assert prompt.ids == [i for i in short for _ in range(next(counts) if i == processor.placeholder_id else 1)]
        answer = [*data.draw(sampled_ids), end]
        trace = TokenTrace.from_arrays(prompt.ids, answer, [-1.0] * len(answer), "stop")
        read = encoder.read_answer(prompt, Sampled(trace, True, 0), episode=episode)
        assert read.trace.images == prompt.images
        messages.append(read.message)
        known_ids, known_spans = [*prompt.ids, *answer], prompt.images


def test_an_image_in_the_result_of_a_tool_and_one_numbered_by_the_template():
    numbered = "{% set seen = namespace(images=0) %}" + PARTS.replace(
        "<start>", "{% set seen.images = seen.images + 1 %}picture {{ seen.images }}: <start>"
    )
    processor, (first, second, *_) = make_processor(template=numbered)
    encoder, episode = PromptEncoder(processor.tokenizer, processor), Episode()
    prompt = encoder.encode(Dialogue([user(first)]), episode)
    answer = [100, processor.tokenizer.eos_token_id]
    sampled = Sampled(TokenTrace.from_arrays(prompt.ids, answer, [-1.0, -1.0]), True, 0)
    message = encoder.read_answer(prompt, sampled, episode=episode).message
    shown = {"role": "tool", "tool_call_id": "call00000", "name": "look", "content": [image_part(second)]}
    later = encoder.encode(Dialogue([user(first), message, shown]), episode)
    assert "picture 2: <start><image>" in processor.tokenizer.decode(later.ids[len(prompt.ids) :])
    assert later.images == (*prompt.images, ImageSpan(second, later.images[1].start, 4))


def test_a_template_that_knows_only_parts_shows_every_text():
    processor, (first, *_) = make_processor(template=LLAVA)
    messages = [{"role": "system", "content": "Be brief."}, user("Is it ", first, "red?")]
    text = processor.tokenizer.decode(encode(processor, messages).ids)
    assert text == "SYSTEM: Be brief. USER: <image><image><image><image>\nIs it  red? ASSISTANT:"
    assert "only text" in processor.tokenizer.decode(encode(processor, [{"role": "user", "content": "only text"}]).ids)


@pytest.mark.parametrize("template", [CHATML, None])
def test_markers_are_written_where_a_template_knows_only_text_or_there_is_none(template):
    processor, (first, *_) = make_processor(template=template)
    prompt = encode(processor, [user("Is it ", first, "red?")])
    assert "Is it <image><image><image><image>red?" in processor.tokenizer.decode(prompt.ids)
    assert [span.length for span in prompt.images] == [4]


def test_a_model_of_text_names_itself_and_the_remedy():
    encoder = PromptEncoder(make_byte_tokenizer(), model_name="Qwen2ForCausalLM")
    for part in (image_part("0" * 32), {"type": "image"}, {"type": "image_url", "image_url": {"url": "x"}}):
        with pytest.raises(ConfigError, match=r"Qwen2ForCausalLM reads text alone; name a vision model"):
            encoder.encode(Dialogue([{"role": "user", "content": [part]}]))
    assert encoder.encode(Dialogue([{"role": "user", "content": "?"}])).ids == [66]


def test_images_that_users_write_are_stored_first():
    processor, (first, *_) = make_processor()
    given = {"type": "image", "image": make_picture(16, 16, seed=0)}
    prompt = encode(processor, [{"role": "user", "content": [given, text_part("?")]}])
    assert prompt.dialogue.messages == [user(first, "?")]
    assert [span.digest for span in prompt.images] == [first]


@pytest.mark.parametrize("spelt", ["<image>", "<video>"])
@pytest.mark.parametrize("place", ["content", "part", "reasoning"])
def test_text_that_spells_a_token_of_images_is_refused(spelt, place):
    processor, (first, *_) = make_processor()
    said = {
        "content": {"role": "assistant", "content": f"see {spelt}"},
        "part": user(first, f"see {spelt}"),
        "reasoning": {"role": "assistant", "content": "no", "reasoning_content": f"see {spelt}"},
    }[place]
    encoder = PromptEncoder(processor.tokenizer, processor)
    bad, fine = [user("?"), said], [user(first)]
    error, prompt = encoder.encode_batch([(Dialogue(bad), None), (Dialogue(fine), None)])
    assert isinstance(error, DataError)
    assert f"message 1 ({said['role']}) spells '{spelt}'" in str(error)
    assert prompt.images
    with pytest.raises(DataError, match=spelt):
        check_texts(bad, processor)


def test_the_marks_around_an_image_are_refused_and_tokens_of_turns_are_not():
    for name, refused in (("internvl", "<start>"), ("smolvlm", "<fake_token_around_image>"), ("mistral3", "<break>")):
        _, processor = make_tiny_vision(name)
        with pytest.raises(DataError, match=refused):
            check_texts([user(f"a {refused} b")], processor)
        check_texts([user("a <eos> <end_of_utterance> b")], processor)


def test_a_sampled_answer_that_spells_a_marker_fails_only_where_it_is_rendered_again():
    processor, (first, *_) = make_processor()
    answer = [*processor.tokenizer("see <imag")["input_ids"], *processor.tokenizer("e>")["input_ids"], 0]
    answer[-1] = processor.tokenizer.eos_token_id

    def play(template, said):
        processor.tokenizer.chat_template = template
        encoder, episode = PromptEncoder(processor.tokenizer, processor), Episode()
        prompt = encoder.encode(Dialogue([user(first)]), episode)
        trace = TokenTrace.from_arrays(prompt.ids, answer, [-1.0] * len(answer), "stop")
        message = encoder.read_answer(prompt, Sampled(trace, True, 0), episode=episode).message
        assert message["content"] == "see <image>"
        return prompt, encoder.encode(Dialogue([user(first), {**message, "content": said}, user("?")]), episode)

    prompt, later = play(PARTS, "see <image>")
    assert later.ids[: len(prompt.ids) + len(answer)] == [*prompt.ids, *answer]
    assert later.images == prompt.images
    with pytest.raises(DataError, match=r"message 1 \(assistant\) spells '<image>'"):
        play(PARTS, "see  <image>")  # another answer than the one that was sampled


def test_a_template_that_leaves_out_an_image_is_refused():
    processor, (first, second, *_) = make_processor(template=PARTS.replace("<start><image><end>", "(image)"))
    with pytest.raises(ConfigError, match=r"writes 0 times '<image>' for 2 images"):
        encode(processor, [user(first, second)])


def test_placeholders_must_be_those_of_the_images():
    processor, (first, *_) = make_processor()
    [image] = processor.tokenizer("<image>")["input_ids"]
    [video] = processor.tokenizer("<video>")["input_ids"]
    assert find_spans([5, image, image, 3, image, image, 6], [first], processor, start=10) == (ImageSpan(first, 11, 5),)
    for ids in ([image] * 3, [image] * 5, [image, image, image, video]):
        with pytest.raises(ConfigError, match=rf"has {len(ids)} placeholders for the 4 features of 1 images"):
            find_spans(ids, [first], processor)
    with pytest.raises(ConfigError, match=r"1 placeholders for the 0 features"):
        find_spans([video], [], processor)


def test_the_expansion_of_a_prefix_is_a_prefix():
    processor, (first, _, wide, _) = make_processor()
    text = "a<image>b<image>c"
    whole = expand_markers(text, [first, wide], processor)
    assert whole == "a" + "<image>" * 4 + "b" + "<image>" * 8 + "c"
    assert whole.startswith(expand_markers(text[:9], [first], processor))
