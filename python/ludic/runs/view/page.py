"""One HTML file with everything that `ludic view` shows of some runs. It needs no network.

Texts of a model are data: they stand in a script element that no browser executes, with every `<`
escaped, and the page's own script sets them as text only. The page's content security policy names
the hashes of the one script and the one style sheet that the file has; a browser executes no other.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from ludic import __version__
from ludic.errors import CheckpointError, ConfigError, DataError, MissingExtraError
from ludic.files.atomic import read_json
from ludic.files.json_values import is_finite, make_encodable
from ludic.images.store import ImageError, ImageStore, use_store
from ludic.runs.reading import RunRecord, list_differences, read_steps
from ludic.runs.report.scores import decode_scores, describe_preferences
from ludic.runs.view.episodes import Decode, EpisodeTable

SCRIPTS = ("elements.js", "charts.js", "tables.js", "episodes.js", "preferences.js", "page.js")
"""In the order in which they stand in the file; each uses names of those before it."""
MAX_PICTURES, THUMBNAIL = 200, 256
"""Images that a page shows, and the pixels of their longer side at most."""


def build_page(records: Sequence[RunRecord], *, episodes: int) -> str:
    """The HTML of a page. `episodes`: of each run at most."""
    return format_page(collect(records, episodes=episodes), title=", ".join(record.name for record in records))


def format_page(data: dict[str, Any], *, title: str) -> str:
    """The HTML of a page that shows `data`, as `collect` makes it."""
    names = (*SCRIPTS[:-1], "pictures.js", SCRIPTS[-1]) if "pictures" in data else SCRIPTS
    script = "(() => {\n'use strict';\n" + "".join(_read_asset(name) for name in names) + "})();\n"
    style = _read_asset("page.css")
    parts = {
        "TITLE": html.escape(title),
        "POLICY": (
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
            "base-uri 'none'; form-action 'none'"
        ),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": encode_data(data),
    }
    page = _read_asset("page.html")
    before, *rest = page.split("{{")  # each part is put in once: what it holds is not looked at again
    filled = [parts[name] + after for name, after in (piece.split("}}", 1) for piece in rest)]
    return before + "".join(filled)


def encode_data(data: Any) -> str:
    """JSON that can stand in a script element: it has no `<`, so that nothing in it ends the
    element or begins a comment. A number that is not finite is null."""
    try:
        text = _format(data)
    except ValueError:  # looking at each number beforehand would cost every page seconds
        text = _format(make_encodable(data))
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return text.encode("utf-8", errors="replace").decode("utf-8")  # half of a surrogate pair becomes "?"


def _format(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def collect(records: Sequence[RunRecord], *, episodes: int) -> dict[str, Any]:
    """Everything that the page shows. A number of a run is its place in `runs`."""
    table = EpisodeTable(episodes)
    pictures: dict[str, str] = {}
    for number, record in enumerate(records):
        log = record.path / "rollouts.jsonl"
        with use_store(ImageStore(record.path / "images")) as store:
            table.add(number, log, find_decoder(record.path) if log.is_file() else None, record.path / "token_logps.jsonl")
            add_pictures(pictures, table.images, store)
        table.add_failed(number, record.path / "failed_episodes.jsonl")
    keys = dict.fromkeys(key for record in records for key in record.settings)
    return {
        "version": __version__,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "runs": [_describe(record, table.counts.get(number, 0)) for number, record in enumerate(records)],
        "settings": {key: [record.settings.get(key) for record in records] for key in keys},
        "differing": list(list_differences(records)),
        "episodes": table.rows,
        "pieces": table.pieces,
        **({"pictures": pictures} if pictures else {}),
    }


def add_pictures(pictures: dict[str, str], images: Mapping[str, str], store: ImageStore) -> None:
    """Add the thumbnail, a `data:` URL, for each text that stands for an image (text -> digest), up
    to `MAX_PICTURES` in all. Images that cannot be read have none."""
    for text, digest in images.items():
        if len(pictures) == MAX_PICTURES:
            return
        if text not in pictures:
            with suppress(ImageError, MissingExtraError):
                image, file = store.open(digest), io.BytesIO()
                image.thumbnail((THUMBNAIL, THUMBNAIL))
                image.save(file, "JPEG", quality=85)
                pictures[text] = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _describe(record: RunRecord, logged: int) -> dict[str, Any]:
    return {
        "name": record.name,
        "path": str(record.path),
        "command": record.command,
        "status": record.status,
        "failed": record.failed,
        "algorithm": record.algorithm,
        "model": record.model,
        "steps": record.steps,
        "asked": record.steps_asked,
        "seconds": record.wall_s,
        "versions": record.summary.get("versions") or {},
        "heldout": record.summary.get("heldout") or {},
        "lost": record.summary.get("episodes") or {},
        "samples": record.summary.get("samples") or {},
        "solved": record.summary.get("solved_at"),
        "before": {name: round_number(value) for name, value in record.before.items()},
        "after": {name: round_number(value) for name, value in record.after.items()},
        "intervals": record.intervals,
        "series": read_series(record.path),
        "logged": logged,
        "preferences": _read_preferences(record),
    }


def _read_preferences(record: RunRecord) -> dict[str, Any] | None:
    """The margins and the calibration of a reward model; None for any other run, and for one of an
    older version."""
    path = record.path / "heldout_scores.json"
    if not path.is_file():
        return None
    try:
        metrics = decode_scores(read_json(path))
        return describe_preferences(metrics) if metrics.num_pairs else None
    except (CheckpointError, ConfigError, DataError, KeyError, TypeError, ValueError):
        return None


def _read_asset(name: str) -> str:
    return (files("ludic.runs.view") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def find_decoder(run: Path) -> Decode | None:
    """The text of one token as the run's tokenizer gives it; None for a run without a tokenizer
    that can be read. No code of the folder is run."""
    if not (run / "model" / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(run / "model", trust_remote_code=False, local_files_only=True)
    except Exception:  # whatever a library raises for files that it cannot read
        return None

    def decode(token: int) -> str:
        try:
            return str(tokenizer.decode([token]))
        except Exception:  # a number that the tokenizer does not have
            return f"<{token}>"

    return decode


MAX_POINTS = 4000
"""Steps of a phase that are kept; of more, every k-th and the last, and all evaluations."""
_OF_EVALUATIONS = ("eval/", "eval_seed/")


def read_series(run: Path) -> dict[str, dict[str, Any]]:
    """For each phase, in the order of the file: `steps` [N], and `values`: metric to its N values,
    null where a step has none. A step that was repeated has its last values.

    A line of a training step repeats the numbers of the last evaluation: they count only at the
    step that was evaluated."""
    phases: dict[str, dict[int, dict[str, float]]] = {}
    for line in read_steps(run):
        steps = phases.setdefault(str(line.get("phase", "train")), {})
        is_evaluated = line.get("eval/step", line["step"]) == line["step"]
        numbers = {
            key: round_number(value)
            for key, value in line.items()
            if key not in ("step", "train/step", "eval/step")
            and is_finite(value)
            and (is_evaluated or not key.startswith(_OF_EVALUATIONS))
        }
        steps.setdefault(line["step"], {}).update(numbers)
    return {phase: _make_columns(steps) for phase, steps in phases.items()}


def _make_columns(by_step: dict[int, dict[str, float]]) -> dict[str, Any]:
    every = sorted(by_step)
    stride = -(-len(every) // MAX_POINTS)
    steps = [
        step
        for place, step in enumerate(every)
        if place % stride == 0 or step == every[-1] or any(key.startswith(_OF_EVALUATIONS) for key in by_step[step])
    ]
    names = dict.fromkeys(name for step in steps for name in by_step[step])
    return {"steps": steps, "values": {name: [by_step[step].get(name) for step in steps] for name in sorted(names)}}


def round_number(value: float) -> float:
    """Six significant digits, which is more than a page shows."""
    return float(f"{value:.6g}")
