"""A policy and its tokenizer in Hugging Face layout; of a model with adapters also the adapters and
what they adapt, in folders next to it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ludic.errors import ConfigError
from ludic.files.atomic import write_text
from ludic.files.checkpoints import TOKENIZER_FILES
from ludic.files.manifest import MANIFEST, find_faults, replace_with_manifest
from ludic.models.images.processor import find_processor
from ludic.models.loading import find_whole_model
from ludic.models.lora import save_adapter, save_merged
from ludic.models.places import adapter_folder, base_folder
from ludic.models.state_files import holds_whole_weights
from ludic.models.wrappers import has_adapters

STATIC_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)
"""Patterns of the small files that do not change while a model is trained."""


CARD = "README.md"
CARD_MARK = "<!-- Written by ludic. Without this line the file is yours, and is not replaced. -->"
"""In each card that was written and may be replaced."""


def write_card(folder: Path, text: str | None, *, earlier: Path | None = None) -> None:
    """Write the model card of the folder, unless the user wrote one there or in the folder
    `earlier`, which is kept. Without `text` a card that PEFT wrote stays."""
    own = next((place for place in (earlier, folder) if place is not None and _has_own_card(place)), None)
    if own is not None:
        if own != folder:
            shutil.copyfile(own / CARD, folder / CARD)
    elif text is not None:
        write_text(folder / CARD, text)


def _has_own_card(folder: Path) -> bool:
    """Whether there is a card that a user wrote, in any encoding: not this library, and not
    PEFT."""
    try:
        content = (folder / CARD).read_bytes()
    except FileNotFoundError:
        return False
    return CARD_MARK.encode() not in content and PEFT_CARD.encode() not in content


PEFT_CARD = "# Model Card for Model ID"
"""In the card that PEFT writes, which says nothing."""


def save_tokenizer(tokenizer: Any, folder: Path, model: Any) -> None:
    """Write the tokenizer, and of a model that sees images its processor. A tokenizer of the
    processor's own is replaced."""
    if (processor := find_processor(model)) is not None:
        processor.processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_policy(
    model: Any, tokenizer: Any, folder: Path, *, base: str | None = None, make_card: Callable[[bool], str | None] | None = None
) -> None:
    """Write model and tokenizer. Adapters are merged in `folder`, and are written alone to
    `adapter` next to it. They name `base` as their base model, or without it the folder `base` next
    to them. `make_card` gives the model card, of adapters if its argument is true."""
    with replace_with_manifest(folder) as aside:
        save_tokenizer(tokenizer, aside, model)
        if has_adapters(model):
            save_merged(model, aside)
        else:
            model.save_pretrained(aside)
        write_card(aside, None if make_card is None else make_card(False), earlier=folder)
    if has_adapters(model):
        named = base or str(base_folder(folder).resolve())
        # PEFT writes the first to adapter_config.json, and the others to the model card.
        model.peft_config["default"].base_model_name_or_path = named
        model.config.name_or_path = model.get_base_model().name_or_path = named
        with replace_with_manifest(adapter_folder(folder)) as aside:
            save_adapter(model, aside)
            save_tokenizer(tokenizer, aside, model)
            write_card(aside, None if make_card is None else make_card(True), earlier=adapter_folder(folder))


class TokenizerFiles:
    """The files of a tokenizer, and of the processor of `model`, which a run saves with each
    checkpoint. They are made once: a large vocabulary takes longer to write as JSON than to
    copy."""

    def __init__(self, tokenizer: Any, model: Any = None) -> None:
        self._tokenizer, self._model = tokenizer, model
        self._contents: dict[str, bytes] = {}

    def write(self, folder: Path) -> None:
        """Write the files into the folder."""
        if not self._contents:
            with tempfile.TemporaryDirectory(prefix="ludic-tokenizer-") as made:
                save_tokenizer(self._tokenizer, Path(made), self._model)
                paths = [path for path in sorted(Path(made).rglob("*")) if path.is_file()]
                self._contents = {path.relative_to(made).as_posix(): path.read_bytes() for path in paths}
        for name, content in self._contents.items():
            place = folder / name
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(content)


class StaticFiles:
    """The small files of a model's folder, which are added to each checkpoint. They are read
    once."""

    def __init__(self, source: Path) -> None:
        """Raises ConfigError for a folder without such files."""
        paths = sorted(path for pattern in STATIC_FILES for path in source.glob(pattern) if path.is_file())
        if not paths:
            raise ConfigError(f"static_files ({source}) has no config and no tokenizer; name the folder of a model")
        self._contents = {path.name: path.read_bytes() for path in paths}

    def write(self, folder: Path) -> None:
        """Write those that the folder does not have."""
        for name, content in self._contents.items():
            if not (folder / name).exists():
                (folder / name).write_bytes(content)


def save_missing_base(model: Any, tokenizer: Any, source: str | None, folder: Path) -> None:
    """Write the model that the adapters adapt, and the tokenizer, to `folder`, if `source` is no
    such model and the folder holds none, whole and undamaged. Without adapters nothing is written.

    Call it before the first step and before a checkpoint is read: until then the adapters change
    nothing, and the merged weights equal the base.
    """
    if not has_adapters(model) or find_whole_model(source) is not None:
        return
    if not holds_whole_weights(folder) or ((folder / MANIFEST).exists() and find_faults(folder)):
        with replace_with_manifest(folder) as aside:
            save_merged(model, aside)
            save_tokenizer(tokenizer, aside, model)
