"""Whether a run that was killed and resumed is the uninterrupted run, bit for bit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

NOT_COMPARED = {
    *("id", "ts_ns", "memory", "phases_s", "overlap", "weight_sync", "wall_s", "pairs_per_s", "ranks/slowest"),
    *("perf/tflops", "perf/mfu", "perf/tokens_per_s_per_gpu"),
}
"""Keys of times, memory and random names, which differ between two uninterrupted runs too, as do
all keys that end with `_s`."""
_OF_SAMPLES = ("loss", "grad_norm", "avg_total_reward", "num_samples", "policy_lag")
_OF_EPISODES = ("problem_id", "group_id", "episode_idx", "policy_version")
_MODELS = ("model", "adapter", "base", "best")


def compare(run: Path, whole: Path) -> list[str]:
    """What differs between a run and the uninterrupted one, beside times and random names."""
    differences = []
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        found, wanted = read_lines(run / name), read_lines(whole / name)
        if found != wanted:
            first = next(
                (n for n, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]),
                min(map(len, (found, wanted))),
            )
            differences.append(f"{name}: {len(found)} lines for {len(wanted)}; line {first + 1} is the first that differs")
    differences += _repeated(run)
    if plain(json.loads((run / "summary.json").read_text())) != plain(json.loads((whole / "summary.json").read_text())):
        differences.append("summary.json")
    files = [{path.relative_to(root) for path in root.rglob("*") if path.is_file()} for root in (run, whole)]
    # A run that is killed before it deletes an older checkpoint, and has no more to save, keeps it.
    added = [path for path in files[0] - files[1] if path.parts[0] != "checkpoints" or any(part[0] == "." for part in path.parts)]
    differences += [f"only in one of the two: {path}" for path in sorted([*added, *(files[1] - files[0])])]
    models = [path for path in files[0] & files[1] if path.parts[0] in _MODELS]
    differences += [f"content of {path}" for path in models if _content(run, path) != _content(whole, path)]
    return differences


def compare_training(run: Path, whole: Path) -> list[str]:
    """What differs in the weights, in what was trained, and in the rollouts: all that an exact run
    with actors has in common with another one."""
    names = {path.relative_to(root) for root in (run, whole) for path in (root / "model").iterdir()}
    differences = [f"content of {name}" for name in sorted(names) if not _same_content(run, whole, name)]
    differences += [f"what {part.__name__} finds" for part in (_trained, _episodes) if part(run) != part(whole)]
    return differences + _repeated(run)


def _same_content(run: Path, whole: Path, path: Path) -> bool:
    return (run / path).exists() and (whole / path).exists() and _content(run, path) == _content(whole, path)


def _trained(run: Path) -> list[Any]:
    """The numbers of each step that depend on samples and weights alone."""
    return [
        (line["phase"], line["step"], [line.get(f"train/{name}") for name in _OF_SAMPLES])
        for line in read_lines(run / "metrics.jsonl")
    ]


def _episodes(run: Path) -> list[Any]:
    return [
        ([line["meta"][name] for name in _OF_EPISODES], line["total_reward"], line["steps"])
        for line in read_lines(run / "rollouts.jsonl")
    ]


def check_learning(run: Path) -> None:
    """Raise RuntimeError if a step of the run left the weights as they were: no kill could change
    what it ends with then."""
    steps = [line for line in read_lines(run / "metrics.jsonl") if "train/loss" in line]
    idle = [(line["phase"], line["step"]) for line in steps if float(line["train/grad_norm"]) == 0]
    if idle or not steps:
        raise RuntimeError(f"{run}: no gradient in {idle} of {len(steps)} steps")


def _content(run: Path, path: Path) -> bytes:
    """The file without the place of the run, which an adapter names, and its name, the title of a
    model card."""
    content = (run / path).read_bytes().replace(str(run).encode(), b"RUN")
    if path.name != "README.md":
        return content
    return b"\n".join(line for line in content.split(b"\n") if not line.startswith(b"# "))


def _repeated(run: Path) -> list[str]:
    """Steps and episodes that stand twice in the logs of a run."""
    steps = Counter((line["phase"], line["step"]) for line in read_lines(run / "metrics.jsonl") if "train/loss" in line)
    engines = (line["meta"]["engine"] for line in read_lines(run / "rollouts.jsonl"))
    episodes = Counter(engine["sampling_seed"] for engine in engines)
    return [f"{what} stands {count} times" for what, count in [*steps.items(), *episodes.items()] if count > 1]


def read_lines(path: Path) -> list[Any]:
    """The lines of a log, without what is not compared."""
    return [plain(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def plain(value: Any) -> Any:
    """The value as text that tells every float apart, without what is not compared."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items() if key not in NOT_COMPARED and not key.endswith("_s")}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return repr(value) if isinstance(value, float) else value
