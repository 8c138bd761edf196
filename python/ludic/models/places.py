"""What is meant by a name that can be a place on this machine or an id of the hub."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from ludic.data.places import is_local
from ludic.errors import ConfigError


def check_place(source: str, setting: str = "", *, files: bool = False) -> None:
    """Raise ConfigError for a path of this machine where nothing lies, so that the hub is not asked
    for it; and for a file, unless `files` will do. `setting` is what named it, if that is known.
    `data.places.is_local` says what is a path.
    """
    path, said = Path(source).expanduser(), f"{setting} ({source})" if setting else source
    if path.is_file() and not files:
        raise ConfigError(f"{said} is a file; give the folder that it lies in, in Hugging Face layout, or a hub id")
    if path.exists():
        return
    if is_local(source):
        here = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, here, n=1)
        remedy = (
            f"did you mean {path.parent / near[0]}?"
            if near
            else "give a folder with config.json, or a hub id such as Qwen/Qwen2.5-0.5B"
        )
        raise ConfigError(f"{said} does not exist; {remedy}")
