"""Images in prompts: the text that takes the place of an image's marker, the places of its tokens,
and what servers get, which write images out themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ludic.errors import ConfigError, DataError
from ludic.images import PROCESSOR
from ludic.images.content import intern_messages, list_image_parts
from ludic.types import ImageSpan, Message

if TYPE_CHECKING:
    from ludic.models.images.processor import ImageProcessor

_MULTIMODAL = re.compile(r"(image|video|audio|vision|boi|eoi)\w*_token$")
"""Names of a processor's tokens, such as `fake_image_token`."""


def find_processor(tokenizer: Any) -> ImageProcessor | None:
    """The processor of images that was attached to the model with this tokenizer; None for a model
    that reads text alone."""
    return getattr(tokenizer, PROCESSOR, None)


def intern_given(messages: Sequence[Message], images: ImageProcessor | None, model_name: str) -> Sequence[Message]:
    """The messages of a request with their images in the store. Raises ConfigError if there are
    some, and the model reads text alone."""
    if images is None:
        if any(list_image_parts(messages)):
            raise _make_text_error(model_name)
        return messages
    has_parts = any(isinstance(message.get("content"), list) for message in messages)
    return intern_messages(messages, images.store) if has_parts else messages


def _make_text_error(model_name: str) -> ConfigError:
    return ConfigError(f"the prompt has images, and {model_name} reads text alone; name a vision model, or leave out the images")


def check_texts(messages: Sequence[Message], images: ImageProcessor) -> None:
    """Raise DataError for a message whose text spells a token of images, video or audio: the model
    would read an image there that nobody has given."""
    named = [getattr(token, "content", token) for name, token in vars(images.processor).items() if _MULTIMODAL.search(name)]
    banned = images.tokenizer.convert_ids_to_tokens(list(images.banned_ids))
    tokens = {token for token in (images.marker, *named, *banned) if isinstance(token, str) and token}
    for place, message in enumerate(messages):
        content = message.get("content")
        texts = [part.get("text") for part in content] if isinstance(content, list) else [content]
        for text in (*texts, message.get("reasoning_content")):
            if spelt := next((token for token in tokens if token in str(text or "")), None):
                raise DataError(
                    f"the text of message {place} ({message.get('role')}) spells {spelt!r}, a token of images; write it otherwise"
                )


def expand_markers(text: str, digests: Sequence[str], images: ImageProcessor) -> str:
    """The text with the block of the k-th image in place of the k-th marker. Raises ConfigError if
    it has more markers or fewer.

    Example: with an image of two placeholders, `<image>How many?` is `<image><image>How many?`.
    """
    first, *rest = text.split(images.marker)
    if len(rest) != len(digests):
        raise ConfigError(
            f"the chat template writes {len(rest)} times {images.marker!r} for {len(digests)} images; set chat_template to one that "
            "shows each image once"
        )
    return first + "".join(images.process(digest).block + part for digest, part in zip(digests, rest, strict=True))


def find_spans(ids: Sequence[int], digests: Sequence[str], images: ImageProcessor, *, start: int = 0) -> tuple[ImageSpan, ...]:
    """Where the images are in `ids`, which begin at `start` of a prompt. Raises ConfigError unless
    the ids have the placeholders of these images, and no others.

    Example: ids [5, 9, 9, 3, 9, 9, 6, 9] with the placeholder 9 and images of 4 and 1 placeholders
    have spans of start 1, length 5 and start 7, length 1.
    """
    counts = [images.process(digest).num_placeholders for digest in digests]
    places = [place for place, token in enumerate(ids) if token in images.banned_ids]
    if len(places) != sum(counts) or any(ids[place] != images.placeholder_id for place in places):
        raise ConfigError(
            f"the prompt has {len(places)} placeholders for the {sum(counts)} features of {len(digests)} images; an image needs as many "
            "as its processor says, and text may have none"
        )
    spans, at = list[ImageSpan](), 0
    for digest, count in zip(digests, counts, strict=True):
        first, last = places[at], places[at + count - 1]
        spans.append(ImageSpan(digest, start + first, last - first + 1))
        at += count
    return tuple(spans)


def check_spans(ids: Sequence[int], spans: Sequence[ImageSpan], images: ImageProcessor | None, model_name: str) -> None:
    """Raise ConfigError unless the `spans` that were given with a prompt of ids are those of its
    placeholders, in order."""
    if images is None:
        if spans:
            raise _make_text_error(model_name)
    elif (found := find_spans(ids, [span.digest for span in spans], images)) != tuple(spans):
        raise ConfigError(f"images ({tuple(spans)}) must be the spans of the placeholders, {found}")


def shorten_prompt(ids: Sequence[int], spans: Sequence[ImageSpan], images: ImageProcessor) -> list[int]:
    """The ids with one marker in place of each image, of which a server makes `ids` again. Text
    that the processor writes around an image may share a token with the text beside it, which is
    then encoded again.

    Example: [7, 9, 9, 9, 8] with the span of start 1 and length 3 is [7, 9, 8].
    """
    tokenizer, short, text, after = images.tokenizer, list[int](), "", ""
    begin = end = 0  # of the text after the image before

    def read(part: Sequence[int]) -> str:
        return str(tokenizer.decode(list(part), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False)["input_ids"]) if part else []

    placeholder = read([images.placeholder_id])
    for span in spans:
        block, first = images.process(span.digest).block, span.start
        before = block[: block.find(placeholder)]
        while first > begin and len(read(ids[first : span.start])) < len(before):
            first -= 1
        if first < end:  # a token is of the text around this image and the one before
            text += read(ids[begin : span.start]).removeprefix(after).removesuffix(before)
        else:
            short += [*encode(text + read(ids[begin:end]).removeprefix(after)), *ids[end:first]]
            text = read(ids[first : span.start]).removesuffix(before)
        text += images.marker
        begin = end = span.start + span.length
        after = block[block.rfind(placeholder) + len(placeholder) :]
        while end < len(ids) and len(read(ids[begin:end])) < len(after):
            end += 1
    return [*short, *encode(text + read(ids[begin:end]).removeprefix(after)), *ids[end:]]
