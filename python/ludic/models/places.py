"""Where a model lies: names that can be a path of this machine or an id of the hub, and the folders
next to a run's model."""

from __future__ import annotations

from pathlib import Path

from ludic.data.sources import is_local, suggest_path
from ludic.errors import ConfigError
from ludic.files.atomic import read_json
from ludic.files.checkpoints import ADAPTER_CONFIG

CONFIGS = ("config.json", ADAPTER_CONFIG)
"""Of which a folder has one, if a model or adapters lie in it."""
TOKENIZER_CONFIGS = ("tokenizer_config.json", *CONFIGS)
"""Of which a folder has one, if a tokenizer may lie in it."""


def check_place(source: str, setting: str = "", *, files: bool = False) -> None:
    """Raise ConfigError for a local path that does not exist, so that it is not looked up on the
    hub, and for a file unless `files` are allowed.

    `setting` is the setting that named it, for the error. `data.sources.is_local` decides what is a
    path.
    """
    path, name = Path(source).expanduser(), f"{setting} ({source})" if setting else source
    if path.suffix == ".gguf" and path.is_file():
        raise ConfigError(f"{name} is a GGUF file; `ludic convert {source} FOLDER` makes a folder of it, to name instead")
    if path.is_file() and not files:
        raise ConfigError(f"{name} is a file; give the folder that it lies in, in Hugging Face layout, or a hub id")
    if path.exists():
        return
    if is_local(source):
        form = "give a folder with config.json, or a hub id such as Qwen/Qwen2.5-0.5B"
        raise ConfigError(f"{name} does not exist{suggest_path(path, form)}")


def find_place(source: str | Path, *files: str) -> Path | None:
    """The folder that `source` names and that has one of `files`, by default the config of a model
    or of adapters: itself, or `model` in it for the folder of a run. None without any."""
    folder = Path(source).expanduser()
    return next(
        (place for place in (folder, folder / "model") if any((place / file).is_file() for file in files or CONFIGS)), None
    )


def adapter_folder(model_folder: Path) -> Path:
    """Where the adapters of the model in that folder lie."""
    return model_folder.with_name("adapter")


def base_folder(model_folder: Path) -> Path:
    """Where a run keeps the model that its adapters adapt, if that lies nowhere else."""
    return model_folder.with_name("base")


def holds_only_adapters(place: str) -> bool:
    """Whether the folder has adapters and no whole model."""
    return (Path(place) / ADAPTER_CONFIG).is_file() and not (Path(place) / "config.json").is_file()


def find_adapter_base(adapter: Path) -> str:
    """The model that the adapters adapt: the one that their config names, or the folder `base` next
    to them where that path is gone because the run was moved."""
    named = read_json(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    beside = base_folder(adapter)
    if not named or (Path(named).is_absolute() and not Path(named).is_dir()):
        if not beside.is_dir():
            raise ConfigError(f"the adapters in {adapter} name {named} as their base, which does not exist, nor does {beside}")
        return str(beside)
    return str(named)
