"""The sampled episodes of a run, from rollouts.jsonl, and the failed ones, in a form that a page of
10,000 can hold: the text of a token is stored once, log-probabilities as whole hundredths of a
nat."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ludic.agents.tool_calls import calls_of, describe_call
from ludic.envs.dataset_qa_env import right_answer
from ludic.errors import DataError
from ludic.files.json_values import is_finite
from ludic.files.jsonl import parse_object
from ludic.images.content import find_digests, image_part, show_content
from ludic.types import group_of

MAX_BYTES = 48_000_000
"""Size of all texts and tokens of a run from which on more episodes are left out."""
BLOCK = 32
"""Episodes that stay together if some are left out, so that most groups do."""

Decode = Callable[[int], str]
"""The text of one token."""
TrainerLogps = dict[tuple[str, int], list[Any]]
"""(id of a rollout, index of a step) -> log-probabilities of its sampled tokens, by the trainer."""


class EpisodeTable:
    """Collects the episodes of all runs."""

    def __init__(self, limit: int) -> None:
        """`limit`: episodes of each run at most; of more, every k-th block of `BLOCK` is kept."""
        self.limit = limit
        self.rows: list[list[Any]] = []
        """[run, policy version, problem, group, reward, flags, turns] of each episode. `turns` are
        lists: [observation, action, next observation, reward, credit, flags, token numbers,
        log-probabilities in -0.01 nats, mismatches in 0.001 nats, facts, judged]; a number refers
        to `pieces`. A mismatch is the trainer's log-probability minus the sampler's; there are none
        of a batch that the trainer did not log. None stands for a number that is not finite. Facts
        are texts: calls of tools, the right answer, and the reward of each function. `judged`, a
        text, is there if a judge was asked, and has its verdicts. An episode that failed has no
        group, the reward None, no turn or one, and its error at the end."""
        self.pieces: list[str] = []
        """Texts of tokens."""
        self.counts: dict[int, int] = {}
        """Run -> episodes in its log."""
        self.images: dict[str, str] = {}
        """The text that stands for an image in an observation -> its digest."""

    def add(self, number: int, log: Path, decode: Decode | None, trainer_logps: Path | None = None) -> None:
        """Add the episodes of run `number`. Without `decode` the tokens have no text.
        `trainer_logps`: what a `TokenLog` wrote."""
        if not log.is_file():
            return
        with log.open("rb") as file:
            total = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
        self.counts[number] = total
        stride, size = max(1, -(-total // self.limit)), 0
        known: dict[int, int] = {}
        groups: dict[Any, int] = {}
        own = {} if trainer_logps is None else _read_token_log(trainer_logps)
        for record, length in _read_lines(log, stride):
            size += length
            if size > MAX_BYTES:
                break
            self.rows.append(self._make_row(number, record, groups, known, decode, own))

    def add_failed(self, number: int, log: Path) -> None:
        """Add the failed episodes of run `number`: the last ones, up to `limit` and `MAX_BYTES`.
        Those that a resumed run of an older version failed to play again are added once."""
        if not log.is_file():
            return
        found: dict[str, tuple[dict[str, Any], int]] = {}
        for record, size in _read_lines(log):  # one that is played again differs in its `group_id`, which is drawn
            meta = {key: value for key, value in _read_object(record, "meta").items() if key != "group_id"}
            found.setdefault(json.dumps({**record, "meta": meta}, sort_keys=True), (record, size))
        lines = list(found.values())
        self.counts[number] = self.counts.get(number, 0) + len(lines)
        sizes = itertools.accumulate(length for _, length in reversed(lines))
        fitting = sum(size <= MAX_BYTES for size in sizes)
        shown = lines[max(0, len(lines) - min(fitting, self.limit)) :]
        self.rows += [_make_failed_row(number, record) for record, _ in shown]

    def _make_row(
        self,
        number: int,
        record: Mapping[str, Any],
        groups: dict[Any, int],
        known: dict[int, int],
        decode: Decode | None,
        trainer_logps: TrainerLogps,
    ) -> list[Any]:
        meta = _read_object(record, "meta")
        group, steps = group_of(meta), [step for step in record.get("steps") or () if isinstance(step, dict)]
        logged = _read_object(meta, "engine").get("credit", meta.get("credit"))  # the latter: up to 0.1.0
        credit = logged if isinstance(logged, list) else []
        turns = [
            self._make_turn(
                step,
                credit[place] if place < len(credit) else None,
                trainer_logps.get((str(record.get("id")), place), []),
                known,
                decode,
            )
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

    def _make_turn(
        self, step: Mapping[str, Any], credit: Any, own: Sequence[Any], known: dict[int, int], decode: Decode | None
    ) -> list[Any]:
        trace = _read_object(step, "trace")
        columns = (trace.get(key) for key in ("completion_token_ids", "completion_logprobs"))
        ids, logps = (column if isinstance(column, list) else [] for column in columns)
        tokens = [] if decode is None else [token for token in ids if isinstance(token, int)]
        for token in tokens:
            if token not in known and decode is not None:
                known[token] = len(self.pieces)
                self.pieces.append(decode(token))
        info = _read_object(step, "info")
        right = right_answer(_read_object(info, "row"))
        rewards = {key.removeprefix("rewards/"): value for key, value in info.items() if key.startswith("rewards/")}
        named = [f"{name} {_round(value)}" for name, value in rewards.items() if is_finite(value)]
        return [
            self._show(step.get("prev_obs") or ""),
            str(step.get("action") or ""),
            None if step.get("next_obs") is None else self._show(step["next_obs"]),
            _round(_number(step.get("reward"))),
            None if credit is None else _round(_number(credit)),
            _find_flags([step], {}),
            [known[token] for token in tokens],
            [round(-100 * logp) if is_finite(logp) else None for logp in logps],
            [
                round(1000 * (mine - logp)) if is_finite(mine) and is_finite(logp) else None
                for mine, logp in zip(own, logps, strict=False)
            ],
            [*_describe_call(info), *_describe_tools(info), *([f"right answer {right}"] if right else []), *named],
            *([judged] if (judged := _show_judged(info)) else []),
        ]

    def _show(self, content: Any) -> str:
        self.images.update((show_content([image_part(digest)]), digest) for digest in find_digests(content))
        return show_content(content)


def _describe_call(info: Mapping[str, Any]) -> list[str]:
    """Where a call of an agent stands: the call that it continues, or why it continues none."""
    call, parent, branch = (info.get(name) for name in ("call", "parent", "branch"))
    if not isinstance(call, int) or not isinstance(branch, int):
        return []
    follows = f"continues call {parent}" if isinstance(parent, int) else f"continues none: {info.get('reason')}"
    return [f"call {call}, branch {branch}, {follows}"]


def _show_judged(info: Mapping[str, Any]) -> str:
    """The questions about an answer, each with its verdict; empty without a judge."""
    asked = _read_object(info, "reward_log").get("judge")
    entries = [entry for entry in asked if isinstance(entry, dict)] if isinstance(asked, list) else []
    return "\n\n".join(f"{entry.get('prompt')}\n\n{json.dumps(entry.get('verdict'))}" for entry in entries)


def _describe_tools(info: Mapping[str, Any]) -> list[str]:
    """The calls of tools, each on a line, and whether it failed."""
    return [f"calls {describe_call(call, 80)}{' (failed)' if call['failed'] else ''}" for call in calls_of(info)]


def _read_object(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under the key; an empty one for anything else."""
    value = content.get(key)
    return value if isinstance(value, dict) else {}


def _read_token_log(path: Path) -> TrainerLogps:
    """The last line of each step. Tokens that the trainer has no value for are None."""
    found: TrainerLogps = {}
    for record, _ in _read_lines(path) if path.is_file() else ():
        logps, skipped, step = record.get("logps"), record.get("skipped"), record.get("step")
        if isinstance(logps, list) and isinstance(step, int):
            found[str(record.get("id")), step] = [None] * int(skipped == 1) + logps
    return found


def _make_failed_row(number: int, record: Mapping[str, Any]) -> list[Any]:
    problem = _read_object(record, "meta").get("problem_id")
    seen, answer, error = (record.get(key) for key in ("seen", "answer", "error"))
    turn: list[Any] = [str(seen or ""), str(answer or ""), None, 0.0, None, "", [], [], [], []]
    turns = [] if seen is None and answer is None else [turn]
    return [number, None, "" if problem is None else str(problem), None, None, "", turns, str(error or "unknown error")]


def _find_flags(steps: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> str:
    """`c`: an answer was cut off at its token limit; `p`: the parser refused one; `t`: the episode
    was ended before its end."""
    infos = [step["info"] for step in steps if isinstance(step.get("info"), dict)]
    cut = any(info.get("finish_reason") == "length" or info.get("incomplete_completion") for info in infos)
    refused = any(info.get("parse_error") and not info.get("incomplete_completion") for info in infos)
    is_truncated = bool(meta.get("episode_truncated")) or any(step.get("truncated") for step in steps)
    return "c" * cut + "p" * refused + "t" * is_truncated


def _read_lines(log: Path, stride: int = 1) -> Iterator[tuple[dict[str, Any], int]]:
    """(record, bytes) of the lines in every `stride`-th block of `BLOCK` lines. Incomplete lines,
    as a killed process leaves them, are skipped."""
    with log.open("rb") as file:
        for place, line in enumerate(file):
            if (place // BLOCK) % stride == 0:
                try:
                    yield parse_object(line, f"{log}:{place + 1}"), len(line)
                except DataError:
                    continue


def _number(value: Any) -> float:
    return float(value) if isinstance(value, bool) or is_finite(value) else 0.0


def _round(value: float) -> float:
    return round(value, 4)
