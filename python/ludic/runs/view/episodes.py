"""The sampled episodes of a run, from rollouts.jsonl, in a form that a page of 10,000 can hold: the
text of a token is stored once, log-probabilities as whole hundredths of a nat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ludic.errors import DataError
from ludic.files.json_values import is_finite
from ludic.files.jsonl import parse_object
from ludic.types import group_of

MAX_BYTES = 48_000_000
"""Size of all texts and tokens of a run from which on more episodes are left out."""
BLOCK = 32
"""Episodes that stay together if some are left out, so that most groups do."""

Decode = Callable[[int], str]
"""The text of one token."""


class EpisodeTable:
    """Collects the episodes of all runs."""

    def __init__(self, limit: int) -> None:
        """`limit`: episodes of each run at most; of more, every k-th block of `BLOCK` is kept."""
        self.limit = limit
        self.rows: list[list[Any]] = []
        """[run, policy version, problem, group, reward, flags, turns] of each episode. `turns` are
        lists: [observation, action, next observation, reward, credit, flags, token numbers,
        log-probabilities in -0.01 nats]; a number refers to `pieces`."""
        self.pieces: list[str] = []
        """Texts of tokens."""
        self.counts: dict[int, int] = {}
        """Run -> episodes in its log."""

    def add(self, number: int, log: Path, decode: Decode | None) -> None:
        """Add the episodes of run `number`. Without `decode` the tokens have no text."""
        if not log.is_file():
            return
        total = _count_lines(log)
        self.counts[number] = total
        stride, size = max(1, -(-total // self.limit)), 0
        known: dict[int, int] = {}
        groups: dict[Any, int] = {}
        for record, length in _read_blocks(log, stride):
            size += length
            if size > MAX_BYTES:
                break
            self.rows.append(self._make_row(number, record, groups, known, decode))

    def _make_row(
        self, number: int, record: Mapping[str, Any], groups: dict[Any, int], known: dict[int, int], decode: Decode | None
    ) -> list[Any]:
        meta = record.get("meta") if isinstance(record.get("meta"), dict) else {}
        assert isinstance(meta, dict)
        group, steps = group_of(meta), [step for step in record.get("steps") or () if isinstance(step, dict)]
        logged = meta.get("credit")
        credit = logged if isinstance(logged, list) else []
        turns = [
            self._make_turn(step, credit[place] if place < len(credit) else None, known, decode)
            for place, step in enumerate(steps)
        ]
        return [
            number,
            meta.get("policy_version"),
            "" if meta.get("problem_id") is None else str(meta["problem_id"]),
            None if group is None else groups.setdefault(str(group), len(groups)),
            _round(sum(_number(step.get("reward")) for step in steps)),
            _find_flags(steps, meta),
            turns,
        ]

    def _make_turn(self, step: Mapping[str, Any], credit: Any, known: dict[int, int], decode: Decode | None) -> list[Any]:
        trace = step.get("trace") if isinstance(step.get("trace"), dict) else {}
        assert isinstance(trace, dict)
        ids, logps = trace.get("completion_token_ids") or [], trace.get("completion_logprobs") or []
        pieces = [] if decode is None else [self._find_piece(token, known, decode) for token in ids if isinstance(token, int)]
        return [
            str(step.get("prev_obs") or ""),
            str(step.get("action") or ""),
            None if step.get("next_obs") is None else str(step["next_obs"]),
            _round(_number(step.get("reward"))),
            None if credit is None else _round(_number(credit)),
            _find_flags([step], {}),
            pieces,
            [round(-100 * _number(logp)) for logp in logps],
        ]

    def _find_piece(self, token: int, known: dict[int, int], decode: Decode) -> int:
        if token not in known:
            known[token] = len(self.pieces)
            self.pieces.append(decode(token))
        return known[token]


def _find_flags(steps: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> str:
    """`c`: an answer was cut off at its token limit; `p`: the parser refused one; `t`: the episode
    was ended before its end."""
    infos = [step["info"] for step in steps if isinstance(step.get("info"), dict)]
    cut = any(info.get("finish_reason") == "length" or info.get("incomplete_completion") for info in infos)
    refused = any(info.get("parse_error") and not info.get("incomplete_completion") for info in infos)
    is_truncated = bool(meta.get("episode_truncated")) or any(step.get("truncated") for step in steps)
    return "c" * cut + "p" * refused + "t" * is_truncated


def _read_blocks(log: Path, stride: int) -> Iterator[tuple[dict[str, Any], int]]:
    """(record, bytes) of the lines in every `stride`-th block of `BLOCK` lines. Incomplete lines,
    as a killed process leaves them, are skipped."""
    with log.open("rb") as file:
        for place, line in enumerate(file):
            if (place // BLOCK) % stride == 0:
                try:
                    yield parse_object(line, f"{log}:{place + 1}"), len(line)
                except DataError:
                    continue


def _count_lines(log: Path) -> int:
    with log.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _number(value: Any) -> float:
    """The number; 0 for what is none."""
    return float(value) if isinstance(value, bool) or is_finite(value) else 0.0


def _round(value: float) -> float:
    return round(value, 4)
