"""Images in the content of messages: the forms in which users write them, and the one form that
they have inside the library.

The content of a message is text, or a list of parts:

    [{"type": "image", "image": "ludic-image:DIGEST"}, {"type": "text", "text": "How many?"}]

What users may write, and `intern_messages` turns into it: `{"type": "image"}`, which is filled with
the images of a column in order (TRL), `{"type": "image", "image": X}` (TRL, Qwen), and
`{"type": "image_url", "image_url": {"url": X}}` or `{"type": "input_image", "image_url": X}`
(OpenAI); X is what `ImageStore.add` reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ludic.errors import DataError, MissingExtraError
from ludic.images.store import URI, ImageError, ImageStore, current_store
from ludic.types import Message, Observation

_SOURCES = ("image", "image_url", "url", "path", "base64")
"""Keys of a part that may have its image."""


def image_part(digest: str) -> dict[str, str]:
    """The part of a stored image."""
    return {"type": "image", "image": f"{URI}{digest}"}


def find_digests(content: Any) -> list[str]:
    """The digests of the images of a content, in order."""
    if not isinstance(content, list):
        return []
    return [str(part["image"])[len(URI) :] for part in content if isinstance(part, Mapping) and _is_stored(part)]


def find_message_digests(messages: Sequence[Message]) -> list[str]:
    """The same of all messages."""
    return [digest for message in messages for digest in find_digests(message.get("content"))]


def list_image_parts(messages: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """The parts of messages that are images, in any form that users write."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return (part for part in parts if isinstance(part, Mapping) and "image" in str(part.get("type")))


def is_content(value: Any) -> bool:
    """Whether the value is text, or a list of parts of text and stored images."""
    if not isinstance(value, list):
        return isinstance(value, str)
    return all(
        isinstance(part, Mapping) and (_is_stored(part) or (part.get("type") == "text" and isinstance(part.get("text"), str)))
        for part in value
    )


def join_contents(contents: Sequence[Observation], separator: str) -> Observation:
    """One content of several, with a text between them; empty ones are left out."""
    contents = [content for content in contents if content]
    if all(isinstance(content, str) for content in contents):
        return separator.join(map(str, contents))
    parts: list[dict[str, Any]] = []
    for content in contents:
        parts += [{"type": "text", "text": separator}] if parts else []
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def show_content(content: Any) -> str:
    """A content as text for people. An image is its size and the first digits of its digest:
    `[image 24x24 3fa91c07...]`; without the size if it is not in the store of this process."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "".join(_show_part(part) for part in content)


def to_openai(messages: Sequence[Message], store: ImageStore) -> list[Message]:
    """The messages with their stored images as parts in OpenAI's form, which have the bytes."""

    def show(part: Any) -> Any:
        digests = find_digests([part])
        return {"type": "image_url", "image_url": {"url": store.data_url(digests[0])}} if digests else part

    contents = (message.get("content") for message in messages)
    return [
        {**message, "content": list(map(show, content))} if isinstance(content, list) else message
        for message, content in zip(messages, contents, strict=True)
    ]


def _show_part(part: Any) -> str:
    if not isinstance(part, Mapping) or not _is_stored(part):
        return str(part.get("text") or "") if isinstance(part, Mapping) else str(part)
    digest, size = str(part["image"])[len(URI) :], ""
    with suppress(ImageError, MissingExtraError):
        size = "{}x{} ".format(*current_store().size(digest))
    return f"[image {size}{digest[:8]}...]"


def intern_messages(
    messages: Sequence[Message], store: ImageStore, *, images: Sequence[Any] = (), base: Path | None = None, where: str = ""
) -> list[Message]:
    """The messages with their images in `store`. `images` fill the parts `{"type": "image"}` in
    order. Raises DataError, which begins with `where`, if there are more or fewer, for parts that
    are neither text nor image, and for an image of the assistant's."""
    given = iter(enumerate(images))
    interned: list[Message] = []
    for place, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = _intern_parts(content, given, store, base, where, f"message {place}: ")
            if message.get("role") == "assistant" and find_digests(parts):
                raise DataError(f"{where}message {place} is the assistant's and has an image; it must be text")
            message = {**message, "content": parts if find_digests(parts) else "".join(part["text"] for part in parts)}
        interned.append(message)
    if unused := sum(1 for _ in given):
        raise DataError(f"{where}{len(images) - unused} image parts and {len(images)} images; there must be a part for each")
    return interned


def intern_prompt(
    prompt: str | Sequence[Message], store: ImageStore, *, images: Sequence[Any] = (), base: Path | None = None, where: str = ""
) -> str | list[Message]:
    """A prompt with its images in `store`. A text with `images` is one message of the user that
    begins with them. Messages without any part for them have the images at the begin of the first
    message of the user."""
    if isinstance(prompt, str):
        if not images:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if images and not any(isinstance(message.get("content"), list) for message in prompt):
        first = next((place for place, message in enumerate(prompt) if message.get("role") == "user"), None)
        if first is None:
            raise DataError(f"{where}{len(images)} images and no message of the user that could have them")
        parts = [*({"type": "image"} for _ in images), {"type": "text", "text": prompt[first].get("content") or ""}]
        prompt = [*prompt[:first], {**prompt[first], "content": parts}, *prompt[first + 1 :]]
    return intern_messages(prompt, store, images=images, base=base, where=where)


def intern_observation(observation: Any, store: ImageStore) -> Observation:
    """What an environment shows, with its images in `store`: text, an image, or a list of texts,
    images and parts. Raises DataError for anything else."""
    if isinstance(observation, str):
        return observation
    parts = []
    for each in observation if isinstance(observation, list | tuple) else [observation]:
        is_part = each is None or (isinstance(each, Mapping) and "type" in each)
        source = {"type": "text", "text": each} if isinstance(each, str) else {"type": "image", "image": each}
        parts.append(each if is_part else source)
    interned = _intern_parts(parts, iter(()), store, None, "an observation: ", "")
    return interned if find_digests(interned) else "".join(part["text"] for part in interned)


def _is_stored(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "image" and isinstance(part.get("image"), str) and part["image"].startswith(URI)


def _intern_parts(
    parts: Sequence[Any], given: Iterator[tuple[int, Any]], store: ImageStore, base: Path | None, where: str, message: str
) -> list[dict[str, Any]]:
    """The parts of one content. `given`: the images of the row that no part before had."""
    interned: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        name, kind = f"{where}{message}part {number}", part.get("type") if isinstance(part, Mapping) else None
        if kind in ("text", "input_text", "output_text"):
            if not isinstance(part.get("text"), str):
                raise DataError(f"{name} has the text {part.get('text')!r:.60}; it must be a text")
            interned.append({"type": "text", "text": part["text"]})
            continue
        if kind not in ("image", "image_url", "input_image"):
            shown = f"of type {kind!r}" if isinstance(part, Mapping) else f"{part!r:.60}"
            raise DataError(f"{name} is {shown}; a part is text or an image")
        if (source := find_source(part)) is None:
            place, source = next(given, (None, None))
            if place is None:
                raise DataError(f"{name} is an image, and there are no more images; give one for each part")
            name = f"{where}images[{place}]"
        interned.append(image_part(intern_image(source, store, base, name)))
    return interned


def find_source(part: Mapping[str, Any]) -> Any:
    """The image of a part; None of a part that a column fills."""
    key = next((key for key in _SOURCES if part.get(key) is not None), None)
    source = None if key is None else part[key]
    if isinstance(source, Mapping) and "url" in source:
        return source["url"]
    return f"data:;base64,{source}" if key == "base64" else source


def intern_image(source: Any, store: ImageStore, base: Path | None, name: str) -> str:
    """The digest of an image, which is in `store` then. An image that is named by its digest may
    also be in the folder `images` of `base`, where a run has it. Raises ImageError, which begins
    with `name`."""
    if not (isinstance(source, str) and source.startswith(URI)):
        return store.add(source, base=base, name=name)
    digest = source[len(URI) :]
    if not store.has(digest):
        if base is None or not (other := ImageStore(base / "images")).has(digest):
            raise ImageError(f"{name} ({source!r:.80}) is not in {store.folder}; give the image itself")
        store.add(other.read(digest), name=name)
    return digest
