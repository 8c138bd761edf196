"""What names a place on this machine, and what may be an id of the hub: a typing error must not
be asked of the network."""

from __future__ import annotations

from pathlib import Path

_FILE_SUFFIXES = frozenset(
    (
        *(".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md", ".xlsx"),
        *(".yaml", ".yml", ".toml", ".py", ".gz", ".zip", ".zst", ".tar"),
        *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx"),
    )
)


def is_local(source: str) -> bool:
    """Whether `source` can only mean a file or a folder of this machine.

    It is there; or it is written as a path (from `.`, `/` or `~`, with several separators, or with
    a backslash); or it has a file's suffix; or its first folder is there, as in `runs/nosuch`. An
    id of the hub is `name` or `owner/name`.
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
