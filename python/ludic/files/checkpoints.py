"""Names in a folder of checkpoints, and whether a checkpoint is what was written. Reads without
torch."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from ludic.errors import CheckpointError, ConfigError
from ludic.files.atomic import read_json
from ludic.files.manifest import MANIFEST, find_faults, read_manifest

STEP_NAME = re.compile(r"step_(\d{6,})")
STATE, LATEST = "trainer_state.json", "latest.json"
BEST = "best"
"""Folder next to the checkpoints: what `TrainingBackend.save` writes without an optimizer,
best.json with its `step`, and a manifest."""
INDEX, MODEL, ADAPTER = "model.safetensors.index.json", "model.safetensors", "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
SHARDS = "model.shards.json"
"""Names the files of weights that are as the ranks had them: parts of tensors."""
WEIGHT_FILES = (INDEX, MODEL, ADAPTER, SHARDS)
"""Files that decide which weights are read from a folder, where they exist."""
PICKLED = ("pytorch_model.bin.index.json", "pytorch_model.bin", "pytorch_model.pt", "optimizer.bin", "checkpoint.pt")
"""Files of other libraries that are pickles, or name some."""
FOREIGN = (*WEIGHT_FILES, "optimizer.safetensors", "optimizer.json", STATE)
"""Files that would be read if somebody put them into a checkpoint."""

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Files of the processor of a model that sees images."""
TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.model"),
    *("*.tiktoken", "tekken.json", "*.jinja", "chat_template.json"),
    *PROCESSOR_FILES,
)
"""Patterns of the files of tokenizers and processors."""
_MODEL_FILES = (
    *("config.json", "generation_config.json", ADAPTER_CONFIG),
    *TOKENIZER_FILES,
    "additional_chat_templates/*.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
    SHARDS,
)

logger = logging.getLogger(__name__)

LAYOUTS = ("full", "shallow")
"""Of checkpoints: models that stand alone, or what resuming needs."""


def check_layout(layout: str) -> None:
    """Raise ConfigError for a layout that does not exist."""
    if layout not in LAYOUTS:
        raise ConfigError(f"layout ({layout}) of checkpoints must be one of {', '.join(LAYOUTS)}")


def find_checkpoint_faults(folder: Path) -> list[str]:
    """The damage of a checkpoint: one phrase for each file, [] if it is whole. Every
    byte is read.

    A folder without a manifest was written by an older version and cannot be verified. It is a
    fault if latest.json names its manifest, or a checkpoint that was written before it has one.
    """
    if not (folder / MANIFEST).exists():
        return [f"{MANIFEST} is missing"] if _had_manifest(folder) else []
    faults = find_faults(folder, FOREIGN)
    if not faults and STEP_NAME.fullmatch(folder.name) and (step := read_manifest(folder)["step"]) != parse_step(folder):
        faults.append(f"it is the checkpoint of step {step}")
    return faults


def warn_if_unverifiable(folder: Path) -> Path:
    """`folder`, with a warning if it has no manifest."""
    if not (folder / MANIFEST).exists():
        logger.warning("%s has no %s: an older version wrote it, and it cannot be verified", folder, MANIFEST)
    return folder


def list_model_files(folder: Path) -> list[str]:
    """The files in `folder` that are loaded from it as a model or a tokenizer. Others,
    such as a run's folder inside, change nothing."""
    found = (path for pattern in _MODEL_FILES for path in folder.glob(pattern) if path.is_file())
    return sorted({path.relative_to(folder).as_posix() for path in found if not path.name.startswith("optimizer")})


def check_model_folder(folder: Path, remedy: str) -> Path:
    """`folder`, which holds a model. Every byte is read. Raises CheckpointError, which names the
    files that are damaged or were added, and the remedy; a folder of an older version is not
    verified, with a warning."""
    if (warn_if_unverifiable(folder) / MANIFEST).exists() and (faults := find_faults(folder, list_model_files(folder))):
        raise CheckpointError(f"{folder} is damaged: {', '.join(faults)}; {remedy}")
    return folder


def parse_step(folder: Path) -> int:
    """The step in the name of a checkpoint. Raises CheckpointError if it has another name."""
    match = STEP_NAME.fullmatch(folder.name)
    if match is None:
        raise CheckpointError(f"{folder} is not named step_NNNNNN")
    return int(match.group(1))


def _had_manifest(folder: Path) -> bool:
    """Whether a version that writes manifests wrote this checkpoint."""
    if not STEP_NAME.fullmatch(folder.name):
        return False
    written = folder.stat().st_mtime
    for other in (manifest.parent for manifest in folder.parent.glob(f"step_*/{MANIFEST}")):
        is_older = STEP_NAME.fullmatch(other.name) is not None and parse_step(other) < parse_step(folder)
        if is_older and other.stat().st_mtime < written:
            return True
    try:
        pointer = read_json(folder.parent / LATEST)
    except (CheckpointError, OSError):
        return False
    return pointer.get("last_checkpoint") == folder.name and pointer.get("manifest") is not None
