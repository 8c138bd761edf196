"""`ludic checkpoint list` and `verify`: which checkpoints a run has, and whether they are what was
written. `ludic checkpoint export`: one as a folder that `from_pretrained` and vLLM open."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from ludic.errors import CheckpointError, ConfigError, check_value
from ludic.files.atomic import read_json, replace_folder
from ludic.files.checkpoints import ADAPTER, ADAPTER_CONFIG, BEST, STEP_NAME, TOKENIZER_FILES, find_checkpoint_faults
from ludic.files.manifest import MANIFEST


@dataclass(frozen=True)
class CheckpointLine:
    """The line that is printed for a checkpoint."""

    path: str
    saved: str
    """Local time."""
    size: int
    """Bytes of all files."""
    state: str
    """verified, damaged, unverifiable (an older version wrote no manifest), or listed: not read."""
    faults: list[str]
    """The damage, one phrase for each file."""
    layout: str = "full"
    """full, or shallow: for resuming alone."""


def checkpoint_command(path: Path, *, verify: bool, json_only: bool) -> int:
    """Print the checkpoints in `path`, which is a run, a folder of checkpoints, or one checkpoint.
    Returns the exit status: 1 if one is damaged."""
    lines = [_describe(folder, verify=verify) for folder in find_checkpoints(path)]
    if json_only:
        typer.echo(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        for line in lines:
            shown = f": {', '.join(line.faults)}" if line.faults else ""
            state = "" if line.state == "listed" else f"  {line.state}{shown}"
            layout = "  shallow" if line.layout == "shallow" else ""
            typer.secho(f"{line.path}  {line.saved}  {_readable(line.size)}{layout}{state}", fg="red" if line.faults else None)
    return int(any(line.faults for line in lines))


def find_checkpoints(path: Path) -> list[Path]:
    """`path` if it is a checkpoint, else all checkpoints in it, by phase and step, and the weights
    of the best evaluation (`best`). Raises CheckpointError if there are none."""
    if (path / MANIFEST).is_file() or (path.is_dir() and STEP_NAME.fullmatch(path.name)):
        return [path]
    steps = [folder for folder in path.rglob("step_*") if folder.is_dir() and STEP_NAME.fullmatch(folder.name)]
    folders = sorted([*steps, *(manifest.parent for manifest in path.rglob(f"{BEST}/{MANIFEST}"))])
    if not folders:
        raise CheckpointError(f"there is no checkpoint (step_NNNNNN) in {path}; name a run, its checkpoints, or one of them")
    return folders


def _describe(folder: Path, *, verify: bool) -> CheckpointLine:
    faults = find_checkpoint_faults(folder) if verify else []
    unverifiable = not (folder / MANIFEST).exists()
    state = "damaged" if faults else "unverifiable" if unverifiable else "verified" if verify else "listed"
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(folder.stat().st_mtime))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    layout = "full"
    with suppress(CheckpointError, OSError):  # the manifest may be damaged
        layout = str(read_json(folder / MANIFEST).get("layout", layout))
    return CheckpointLine(str(folder), saved, size, state, faults, layout)


def _readable(size: int) -> str:
    """Example: 1,234,567 is `1.2 MB`."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


DTYPES = ("float32", "bfloat16", "float16")
RUN_FOLDERS = ("model", "base", "adapter")
"""Folders of a run that have its tokenizer."""


def export_command(checkpoint: Path, out: Path, *, dtype: str | None, merge: bool, base: str | None) -> int:
    """Verify the checkpoint, write it to the new folder `out`, and return the exit status."""
    import torch

    from ludic.models.exporting import export_adapter, export_merged, export_model

    check_value("--dtype", dtype, choices=DTYPES, optional=True)
    if out.exists():
        raise ConfigError(f"{out} exists already, and is not replaced; give a new folder")
    folder, *others = find_checkpoints(checkpoint)
    if others:
        raise ConfigError(f"{checkpoint} has {1 + len(others)} checkpoints; name one of them, such as {others[-1]}")
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
            adapted = Path(_find_base(folder, base))
            if not (adapted / "config.json").is_file():
                raise ConfigError(f"{folder} adapts {adapted}, which is no folder here; give its folder with --base")
            export_merged(folder, adapted, aside, torch_dtype)
        else:
            export_adapter(folder, aside, base=_find_base(folder, base), dtype=torch_dtype)
        has_tokenizer = _copy_tokenizer(folder, base, aside)
    typer.echo(f"{out}: {'adapters' if is_adapter and not merge else 'model'} of {folder}")
    if not has_tokenizer:
        typer.secho(
            "No tokenizer was found next to the checkpoint: copy its files there before you serve it", fg="yellow", err=True
        )
    return 0


def _find_run(folder: Path) -> Path | None:
    """The folder of the run that the checkpoint is in."""
    return next((parent for parent in folder.resolve().parents if (parent / "config.yaml").is_file()), None)


def _find_base(folder: Path, given: str | None) -> str:
    """The model that the adapters adapt: `given`, or the folder `base` of the run, or the one that
    their config names."""
    from ludic.models.loading import find_whole_model

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


def _copy_tokenizer(folder: Path, base: str | None, out: Path) -> bool:
    """Copy the files of the tokenizer from the first folder that has them. False if none has."""
    run = _find_run(folder)
    places = [folder, *([] if run is None else [run / name for name in RUN_FOLDERS]), *([] if base is None else [Path(base)])]
    for place in places:
        files = {path for pattern in TOKENIZER_FILES for path in place.glob(pattern)} if place.is_dir() else set()
        if any(path.name.startswith("tokenizer") for path in files):
            for path in files:
                shutil.copyfile(path, out / path.name)
            return True
    return False
