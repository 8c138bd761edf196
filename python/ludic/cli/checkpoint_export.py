"""`ludic checkpoint export`: a checkpoint as one folder that `from_pretrained` and vLLM open."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import typer

from ludic.cli.checkpoint import find_checkpoints
from ludic.errors import CheckpointError, ConfigError
from ludic.files.atomic import read_json
from ludic.files.checkpoints import ADAPTER, ADAPTER_CONFIG, TOKENIZER_FILES, find_checkpoint_faults
from ludic.files.folders import replace_folder
from ludic.files.manifest import MANIFEST
from ludic.models.exporting import export_adapter, export_merged, export_model
from ludic.models.loading import find_whole_model

DTYPES = ("float32", "bfloat16", "float16")
RUN_FOLDERS = ("model", "base", "adapter")
"""Folders of a run that have its tokenizer."""


def export_command(checkpoint: Path, out: Path, *, dtype: str | None, merge: bool, base: str | None) -> int:
    """Verify the checkpoint, write it to the new folder `out`, and return the exit status."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype ({dtype}) must be one of {', '.join(DTYPES)}")
    if out.exists():
        raise ConfigError(f"{out} exists already, and is not replaced; give a new folder")
    folder = _find_one(checkpoint)
    faults = find_checkpoint_faults(folder)
    if faults:
        raise CheckpointError(f"{folder} is damaged: {', '.join(faults)}; `ludic checkpoint verify` finds one that is not")
    if not (folder / MANIFEST).exists():
        typer.secho(f"{folder} has no {MANIFEST} and cannot be verified: an older version wrote it", fg="yellow", err=True)
    torch_dtype: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
    is_adapter = (folder / ADAPTER).is_file()
    if not is_adapter and (merge or base is not None):
        raise ConfigError(f"{folder} has no adapters, so there is nothing to merge; leave --merge and --base out")
    with replace_folder(out) as aside:
        if not is_adapter:
            export_model(folder, aside, torch_dtype)
        elif merge:
            export_merged(folder, _require_folder(_find_base(folder, base), folder), aside, torch_dtype)
        else:
            export_adapter(folder, aside, base=_find_base(folder, base), dtype=torch_dtype)
        tokenizer = _copy_tokenizer(folder, base, aside)
    typer.echo(f"{out}: {'adapters' if is_adapter and not merge else 'model'} of {folder}")
    if tokenizer is None:
        typer.secho(
            "No tokenizer was found beside the checkpoint: copy its files there before you serve it", fg="yellow", err=True
        )
    return 0


def _find_one(path: Path) -> Path:
    """The checkpoint that `path` is, or the only one in it."""
    found = find_checkpoints(path)
    if len(found) > 1:
        raise ConfigError(f"{path} has {len(found)} checkpoints; name one of them, such as {found[-1]}")
    return found[0]


def _find_run(folder: Path) -> Path | None:
    """The folder of the run that the checkpoint is in."""
    return next((parent for parent in folder.resolve().parents if (parent / "config.yaml").is_file()), None)


def _find_base(folder: Path, given: str | None) -> str:
    """The model that the adapters adapt: `given`, or the folder `base` of the run, or the one that
    their config names."""
    run = _find_run(folder)
    if given is not None:
        found = find_whole_model(given)
        if found is None:
            raise ConfigError(f"--base ({given}) has adapters only; give the model that they adapt")
        return found
    if run is not None and (run / "base" / "config.json").is_file():
        return str(run / "base")
    named = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not named:
        raise ConfigError(f"{folder} does not name the model that its adapters adapt; give it with --base")
    return str(named)


def _require_folder(base: str, folder: Path) -> Path:
    place = Path(base)
    if not (place / "config.json").is_file():
        raise ConfigError(f"{folder} adapts {base}, which is no folder here; download it, and give its folder with --base")
    return place


def _copy_tokenizer(folder: Path, base: str | None, out: Path) -> Path | None:
    """Copy the files of the tokenizer from the first folder that has them. Returns that folder."""
    run = _find_run(folder)
    places = [folder, *([] if run is None else [run / name for name in RUN_FOLDERS]), *([] if base is None else [Path(base)])]
    for place in places:
        files = {path for pattern in TOKENIZER_FILES for path in place.glob(pattern)} if place.is_dir() else set()
        if any(path.name.startswith("tokenizer") for path in files):
            for path in files:
                shutil.copyfile(path, out / path.name)
            return place
    return None
