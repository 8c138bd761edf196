"""Distinguishes local paths from hub ids, so that a mistyped path is not looked up on the
network."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

_FILE_SUFFIXES = frozenset(
    (
        *(".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md", ".xlsx"),
        *(".yaml", ".yml", ".toml", ".py", ".gz", ".zip", ".zst", ".tar"),
        *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx"),
    )
)


def is_local(source: str) -> bool:
    """Whether `source` can only be a local file or folder.

    It exists; or it is written as a path (starts with `.`, `/` or `~`, has several separators or a
    backslash); or it has a file suffix; or its first folder exists, as in `runs/nosuch`. A hub id
    is `name` or `owner/name`.
    """
    first, separator, _ = source.partition("/")
    return (
        Path(source).expanduser().exists()
        or source.startswith((".", "/", "~"))
        or source.count("/") > 1
        or "\\" in source
        or Path(source).suffix.lower() in _FILE_SUFFIXES
        or (bool(separator) and (first == "runs" or Path(first).is_dir()))
    )


def suggest_path(path: Path, otherwise: str) -> str:
    """As `ludic.errors.did_you_mean`, with the files and folders that lie where `path` would."""
    near = get_close_matches(path.name, [each.name for each in path.parent.glob("*")], n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else f"; {otherwise}"
