"""The images of rows: the columns `image` and `images`, and parts of messages. They become digests
in the store when a row is drawn, not when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ludic.data.formats import Row
from ludic.images.content import find_digests, find_message_digests, find_source, intern_image, intern_prompt, list_image_parts
from ludic.images.store import URI, ImageStore, check_source, current_store


def list_images(row: Mapping[str, Any]) -> list[Any]:
    """The images of the columns `images`, a list, or `image`, one; [] without any."""
    images: Any = next((row[name] for name in ("images", "image") if row.get(name) is not None), [])
    return list(images) if isinstance(images, list | tuple) else [images]


def has_images(row: Mapping[str, Any]) -> bool:
    """Whether the row has images, in columns or in parts of messages."""
    return bool(list_images(row)) or any(True for _ in _list_parts(row))


def _list_parts(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return list_image_parts(message for value in row.values() if isinstance(value, list) for message in value)


def check_images(row: Mapping[str, Any], folder: Path | None, where: str) -> None:
    """Raise ImageError, which begins with `where`, for an image whose file is missing or outside of
    the folder, and for a URL. Opens no file."""
    for number, image in enumerate(list_images(row)):
        check_source(image, folder, f"{where}: images[{number}]")
    for part in _list_parts(row):
        check_source(find_source(part), folder, f"{where}: an image of a message")


def intern_row(row: Row, folder: Path | None, where: str, store: ImageStore | None = None) -> Row:
    """The row with its images in the store: `images` has them as `ludic-image:DIGEST`, and the
    messages of `prompt` and `messages`, without these of `chosen` and `rejected`, have parts for
    them. A text prompt becomes a message, and its answers too. Raises DataError, which begins with
    `where`. A row of text is returned as it is.

    Example: `{"prompt": "How many?", "image": "a.png"}` becomes

        {"prompt": [{"role": "user", "content": [{"type": "image", ...}, {"type": "text", ...}]}],
         "image": "ludic-image:3fa9...", "images": ["ludic-image:3fa9..."]}
    """
    if isinstance(row.get("steps"), list):
        for digest in _find_step_digests(row["steps"]):
            intern_image(f"{URI}{digest}", store or current_store(), folder, f"{where}: an image")
        return row
    if not has_images(row):
        return row
    store, name = store or current_store(), f"{where}: "
    given = [f"{URI}{intern_image(each, store, folder, f'{name}images[{n}]')}" for n, each in enumerate(list_images(row))]
    changed = {**row, "images": given}
    shown = [name for name in ("prompt", "messages") if row.get(name) is not None] or ["chosen", "rejected"]
    for column in shown:
        if isinstance(row.get(column), str | list):
            has_them = given == _list_uris(row[column])  # a row that was interned before
            changed[column] = intern_prompt(row[column], store, images=() if has_them else given, base=folder, where=name)
            changed["images"] = _list_uris(changed[column])
    if row.get("image") is not None:
        changed["image"] = given[0]
    if isinstance(row.get("prompt"), str):
        answers = [name for name in ("completion", "chosen", "rejected") if isinstance(row.get(name), str)]
        changed |= {name: [{"role": "assistant", "content": row[name]}] for name in answers}
    return changed


def _list_uris(prompt: Any) -> list[str]:
    return [f"{URI}{digest}" for digest in find_message_digests(prompt if isinstance(prompt, list) else [])]


def _find_step_digests(steps: list[Any]) -> list[str]:
    traces = [step.get("trace") or {} for step in steps if isinstance(step, Mapping)]
    shown = [step.get(name) for step in steps if isinstance(step, Mapping) for name in ("prev_obs", "next_obs")]
    read = [str(span[0]) for trace in traces for span in trace.get("images") or ()]
    return list(dict.fromkeys([*read, *(digest for content in shown for digest in find_digests(content))]))
