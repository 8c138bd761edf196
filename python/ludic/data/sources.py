"""Reads rows from a file, a folder or a hub id, and keeps the location of each row for messages.

`is_local` distinguishes paths from hub ids, so that a mistyped path is not looked up on the
network.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from random import Random
from typing import Any

from ludic.data.formats import Row
from ludic.errors import DataError, import_optional
from ludic.files.json_values import parse_json
from ludic.files.jsonl import is_blank

_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)


@dataclass(frozen=True)
class Table:
    """Rows and their locations."""

    name: str
    """The file, folder or id."""
    unit: str
    """The unit of `numbers`: `line` or `row`, counted from 1."""
    rows: Sequence[Row]
    numbers: Sequence[int]
    equal_scores: list[int] = field(default_factory=list)
    """Numbers of the rows that were left out because their two scores are equal."""
    places: Sequence[str] = ()
    """Of a mixture: the place of each row in the table that it came from."""
    folder: Path | None = None
    """The folder of the file, to which paths of images are relative; None of an id."""
    folders: Sequence[Path | None] = ()
    """Of a mixture: the folder for each row."""

    def folder_of(self, index: int) -> Path | None:
        """`folder`, or the one of a row of a mixture."""
        return self.folders[index] if self.folders else self.folder

    def where(self, index: int) -> str:
        """Such as `problems.jsonl, line 17`."""
        return self.places[index] if self.places else f"{self.name}, {self.unit} {self.numbers[index]}"


@dataclass(frozen=True)
class Draw:
    """A random sample of at most `limit` rows, in their order. Data sets are often sorted, so the
    first rows would not be representative.

    Example: `Draw(2, seed=0).of(5)` is two of `[0, 1, 2, 3, 4]`, ascending; `Draw().of(5)` is all
    of them.
    """

    limit: int | None = None
    """None means every row."""
    seed: int = 0

    def of(self, count: int) -> Sequence[int]:
        """The indices of the rows to read, of `count` rows."""
        if self.limit is None or self.limit >= count:
            return range(count)
        return sorted(Random(self.seed).sample(range(count), self.limit))


def read_table(source: str, *, config: str | None = None, split: str = "train", draw: Draw | None = None) -> Table:
    """Read the rows of `source`. `config` and `split` are for hub ids and folders. Rows outside
    `draw` are neither parsed nor copied."""
    draw, suffixes = draw or Draw(), ", ".join(sorted(READERS))
    path = find_path(source, READERS, f"ends in {Path(source).suffix or 'nothing'}; files that are read end in {suffixes}")
    if path is None or path.is_dir():
        loaded = open_arrow(source, source if path is None else str(path), config, split)
        drawn = draw.of(len(loaded))
        rows = (loaded if len(drawn) == len(loaded) else loaded.select(drawn)).to_list()
        return replace(_number_rows(source, rows, drawn), folder=path)
    return replace(READERS[path.suffix.lower()](source, path, draw), folder=path.parent)


def find_path(source: str, suffixes: Collection[str], fault: str) -> Path | None:
    """The folder, or the file with one of the `suffixes`, that `source` names; None for an id of
    the hub. Raises DataError for a path that does not exist, and with `fault` for another file."""
    path = Path(source).expanduser()
    if path.exists() and not path.is_dir() and path.suffix.lower() not in suffixes:
        raise DataError(f"{source} {fault}")
    if not path.exists() and is_local(source):
        raise DataError(
            f"{source} does not exist, seen from {Path.cwd()}; give a file ({', '.join(sorted(suffixes))}), a folder or a hub id"
        )
    return path if path.exists() else None


def _read_jsonl(name: str, path: Path, draw: Draw) -> Table:
    lines = [(number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), start=1) if not is_blank(line)]
    drawn = [lines[index] for index in draw.of(len(lines))]
    rows = [parse_line(line, f"{name}, line {number}") for number, line in drawn]
    return Table(name, "line", rows, [number for number, _ in drawn])


def _read_json(name: str, path: Path, draw: Draw) -> Table:
    content = _parse_text(_read_text(name, path), name)
    if not isinstance(content, list):
        raise DataError(f"{name} must hold a list of objects, not {type(content).__name__}; one object a line is .jsonl")
    drawn = draw.of(len(content))
    return _number_rows(name, [_check_object(content[index], f"{name}, row {index + 1}") for index in drawn], drawn)


def _read_csv(name: str, path: Path, draw: Draw) -> Table:
    """All cells are text: `007` stays `007`."""
    lines = csv.reader(io.StringIO(_read_text(name, path), newline=""), strict=True)
    records: list[tuple[int, list[str]]] = []  # the first line of the record, and its cells
    begins = 1
    try:
        for cells in lines:
            records += [(begins, cells)] if cells else []  # without blank lines
            begins = lines.line_num + 1
    except csv.Error as error:
        raise DataError(f"{name}, line {begins} is not CSV: {error}; long texts are better kept as .jsonl") from error
    _, header = records.pop(0) if records else (1, [])
    if not header or len(set(header)) != len(header):
        raise DataError(f"{name}, line 1 must name each column once, got {header}")
    rows, numbers = [], []
    for number, cells in (records[index] for index in draw.of(len(records))):
        if len(cells) != len(header):
            raise DataError(f"{name}, line {number} has {len(cells)} cells for {len(header)} columns ({', '.join(header)})")
        rows.append(dict(zip(header, cells, strict=True)))
        numbers.append(number)
    return Table(name, "line", rows, numbers)


def _read_parquet(name: str, path: Path, draw: Draw) -> Table:
    parquet = import_optional("pyarrow.parquet", "datasets")
    try:
        table = parquet.read_table(path)
        drawn = draw.of(table.num_rows)
        rows = (table if len(drawn) == table.num_rows else table.take(list(drawn))).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are these
        raise DataError(f"{name} is not a parquet file: {error}") from error
    return _number_rows(name, rows, drawn)


READERS: dict[str, Callable[[str, Path, Draw], Table]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def is_saved_data_set(path: Path) -> bool:
    """Whether `save_to_disk` of the `datasets` library wrote this folder."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def open_arrow(name: str, source: str, config: str | None, split: str, *, streaming: bool = False) -> Any:
    """A parquet file, a folder or an id as a data set of the `datasets` library, whose rows stay on
    disk; with `streaming` as an iterable one. The library runs no code of the data set. Rows with
    images are not decoded: if not streamed, each is a table of Arrow."""
    datasets = import_optional("datasets", "datasets")
    try:
        if is_saved_data_set(Path(source)):
            loaded = datasets.load_from_disk(source)
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
            loaded = loaded.to_iterable_dataset() if streaming else loaded
        elif Path(source).is_file():
            loaded = datasets.load_dataset("parquet", data_files=glob.escape(source), split="train")
        else:
            loaded = datasets.load_dataset(source, config, split=split, streaming=streaming)
        if "Image(" not in repr(loaded.features):
            return loaded
        return loaded.decode(False) if streaming else loaded.with_format("arrow")  # images stay bytes until a row is drawn
    except Exception as error:  # its exceptions have no common base
        remedy = "; without a connection, name a file or a folder that has the rows" if isinstance(error, ConnectionError) else ""
        raise DataError(
            f"cannot load {name} (config {config}, split {split}): {type(error).__name__}: {error}{remedy}"
        ) from error


def _number_rows(name: str, rows: list[Row], drawn: Sequence[int]) -> Table:
    return Table(name, "row", rows, [index + 1 for index in drawn])


def _read_text(name: str, path: Path) -> str:
    """UTF-8, with or without a byte order mark."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name}, line {line} is not UTF-8: {error.reason} at byte {error.start}") from error


def parse_line(line: bytes, where: str) -> Row:
    """The row of a line of a JSONL file. Raises DataError for anything but an object in UTF-8."""
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8: {error.reason} at byte {error.start} of the line") from error
    return _check_object(_parse_text(text, where), where)


def _parse_text(text: str, where: str) -> Any:
    """The JSON value. Raises DataError for text that no tokenizer takes: half of a surrogate pair,
    which only an escape can write."""
    value = parse_json(text, where)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where} has half of a surrogate pair ({error.object[error.start]!a}), not valid text") from error
    return value


def _check_object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where} must be an object with columns as keys, not {type(value).__name__}")
    return value


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


def list_task_folders(source: str | Path) -> list[Path]:
    """The tasks in Harbor's format: the folder itself, or those in it. Empty for all else."""
    folder = Path(source).expanduser()
    return [folder] if (folder / "task.toml").is_file() else sorted(path.parent for path in folder.glob("*/task.toml"))


def suggest_path(path: Path, otherwise: str) -> str:
    """As `ludic.errors.did_you_mean`, with the files and folders that lie where `path` would."""
    near = get_close_matches(path.name, [each.name for each in path.parent.glob("*")], n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else f"; {otherwise}"
