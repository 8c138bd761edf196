"""Answers of a policy to held-out prompts, before and after it is trained on preferences."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ludic.eval.statistics import Interval, mean_interval, share_interval
from ludic.files.jsonl import read_jsonl
from ludic.inference.local import LocalChatClient
from ludic.inference.request import SamplingParams
from ludic.training.types import SAWItem

TIMES = ("before", "after", "end")


@dataclass(frozen=True)
class Answer:
    """One sampled answer."""

    prompt: str
    text: str
    is_finished: bool
    """Whether the model ended it, within the token limit."""
    score: float | None = None
    """The quality by the generator of the pairs; None if it is no answer of the task, or if nothing
    judges it."""


@dataclass(frozen=True)
class Answers:
    """What a policy answers."""

    sampled: Sequence[Answer] = field(default_factory=list)
    is_judged: bool = False
    """Whether the true quality of an answer is known."""

    def to_dict(self) -> dict[str, Any]:
        """For summary.json: `score`, the mean quality of well-formed answers, `well_formed`, their
        share, and `finished`, the share of ended answers, each with a 95 % interval."""
        if not self.sampled:
            return {"answers": 0}
        rates: dict[str, Any] = {"finished": _share([answer.is_finished for answer in self.sampled])}
        if self.is_judged:
            scores = [answer.score for answer in self.sampled if answer.score is not None]
            rates["well_formed"] = _share([answer.score is not None for answer in self.sampled])
            rates["score"] = _describe(mean_interval(scores)) if scores else None
        return {"answers": len(self.sampled), **rates}


async def sample_answers(
    model: Any, tokenizer: Any, heldout: Sequence[SAWItem], task: Any, *, count: int, max_new_tokens: int, seed: int
) -> Answers:
    """`count` answers to the prompts of held-out pairs, one prompt after another, at temperature 1.
    The prompts are the tokens that were trained on. If the `task` has
    `judge(prompt, response)`, it gives the quality; None if the response is no answer."""
    prompts = list_prompts(heldout)
    if not prompts or not count:
        return Answers()
    client = LocalChatClient(model, tokenizer, max_batch_size=256)
    sampling = SamplingParams(temperature=1.0, max_tokens=max_new_tokens)
    asked = [prompts[index % len(prompts)] for index in range(count)]
    traces = await asyncio.gather(
        *(client.complete_tokens(prompt, sampling=sampling, seed=seed + index) for index, prompt in enumerate(asked))
    )
    judge = getattr(task, "judge", None)
    answers = []
    for prompt, trace in zip(asked, traces, strict=True):
        question, text = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, trace.completion_token_ids))
        ended = trace.finish_reason == "stop"
        answers.append(Answer(question, text, ended, judge(question, text) if judge is not None and ended else None))
    return Answers(answers, judge is not None)


def read_answers(path: Path, *, before: str) -> list[dict[str, Any]]:
    """The rows of answers.jsonl of the times before that one."""
    rows = [row for _, row in read_jsonl(path)] if path.is_file() else []
    return [row for row in rows if TIMES.index(row["when"]) < TIMES.index(before)]


def list_prompts(items: Sequence[SAWItem]) -> list[list[int]]:
    """The distinct prompts of the samples, in order of first appearance: the tokens before the
    first action. Example: ids [5, 6, 7] and [5, 6, 8] with masks [0, 0, 1] have the one prompt
    [5, 6]."""
    prompts: dict[tuple[int, ...], None] = {}
    for item in items:
        start = int(np.flatnonzero(np.asarray(item.action_mask))[0]) if np.any(item.action_mask) else 0
        if start:
            prompts.setdefault(tuple(int(token) for token in item.input_ids[:start]))
    return [list(prompt) for prompt in prompts]


def _share(hits: Sequence[bool]) -> Mapping[str, float | None]:
    return _describe(share_interval([float(hit) for hit in hits]))


def _describe(interval: Interval) -> dict[str, float | None]:
    return {"mean": interval.value, "low": interval.low, "high": interval.high}
