"""Data sets by hub id or from files: samples for fine-tuning, prompts, and prompts with answers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludic.data.sources import Draw, Table, read_table
from ludic.errors import ConfigError, DataError, RowError
from ludic.inference.prompts.template import read_template_kwargs
from ludic.rollouts.training.datasets.sft import make_sample
from ludic.rollouts.training.types import Sample
from ludic.types import Message

logger = logging.getLogger(__name__)

PROMPT_COLUMNS = ("prompt", "question", "instruction", "input", "text")
"""Where prompts are; the first that a row has is taken."""
ANSWER_COLUMNS = ("answer", "completion", "output", "response", "target")
"""Where answers are."""
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
}
"""Speakers of `{"from": ..., "value": ...}`; others, such as system and tool, are roles already."""
FORMATS = "messages; prompt and completion; instruction (and input) and output; question and answer; conversations"


@dataclass(frozen=True)
class _FirstRows(Draw):
    """The first `limit` rows."""

    def of(self, count: int) -> Sequence[int]:
        return range(count if self.limit is None else min(count, self.limit))


def load_sft_dataset(
    dataset_name: str,
    split: str = "train",
    subset: str | None = None,
    tokenizer: Any = None,
    max_samples: int | None = None,
    max_length: int = 2048,
) -> list[Sample]:
    """The samples of a data set: a hub id, a folder, or a .jsonl, .json, .csv or .parquet file.

    A row has messages; prompt and completion; instruction (and input) and output; question and
    answer; or conversations, of messages or of `{"from": "human", "value": ...}`. The first of
    these forms that fits is used. With a `tokenizer`, samples have tokens, and a mask on what the
    assistant says. `max_samples`: only the first rows are read.

    Rows of no form, without an answer, or of more than `max_length` tokens are left out, and
    counted in a warning. Raises DataError if no row is left.
    """
    table = _read_table(dataset_name, split, subset, max_samples, "max_samples")
    samples: list[Sample] = []
    left_out: Counter[str] = Counter()
    for index, row in enumerate(table.rows):
        messages = messages_of_row(row, table.where(index))
        if messages is None:
            left_out[f"of no known form ({FORMATS})"] += 1
            continue
        try:
            arguments = read_template_kwargs(row, table.where(index))
            sample = make_sample(messages, tokenizer, max_length, table.where(index), template_kwargs=arguments)
        except RowError as error:
            left_out[_REASONS.get(error.reason, error.reason).format(max_length=max_length)] += 1
            continue
        sample.metadata = {"dataset": dataset_name, "index": index}
        samples.append(sample)
    reasons = "; ".join(f"{number} {reason}" for reason, number in left_out.items())
    if not samples:
        raise DataError(f"{dataset_name} has no row to train on: {reasons}")
    if left_out:
        logger.warning("%s: %d rows are used, others are left out: %s", dataset_name, len(samples), reasons)
    return samples


_REASONS = {"prompt_too_long": "longer than max_length={max_length} tokens", "empty_response": "without an answer"}


def messages_of_row(row: Mapping[str, Any], where: str) -> list[Message] | None:
    """The conversation of a row; None if it has none of the known forms."""
    if row.get("messages") is not None:
        return _check_messages(row["messages"], where)
    for prompt, answer in (("prompt", "completion"), ("instruction", "output"), ("question", "answer")):
        if row.get(prompt) is not None and row.get(answer) is not None:
            with_input = prompt == "instruction" and row.get("input")
            question = f"{row[prompt]}\n\n{row['input']}" if with_input else row[prompt]
            return _to_messages(question, "user", where) + _to_messages(row[answer], "assistant", where)
    if row.get("conversations") is not None:
        return _check_messages(row["conversations"], where)
    return None


def _to_messages(value: Any, role: str, where: str) -> list[Message]:
    """A text as one message of this role; messages as they are."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _check_messages(value, where)


def _check_messages(messages: Any, where: str) -> list[Message]:
    """The messages with `role` and `content`. Raises DataError for anything else."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f'{where}: a conversation must be a list of {{"role": ..., "content": ...}}, not {messages!r:.80}')
    checked = []
    for message in messages:
        if "role" in message:
            checked.append(message)
        elif "from" in message and "value" in message:
            checked.append({"role": ROLES.get(message["from"], message["from"]), "content": message["value"]})
        else:
            keys = ", ".join(message)
            raise DataError(f"{where}: a message has the keys {keys}; it must have role and content, or from and value")
    return checked


def load_rl_prompts(
    dataset_name: str, split: str = "train", max_prompts: int | None = None, *, subset: str | None = None
) -> list[Any]:
    """The prompts of a data set, text or messages: the values of the first of the columns prompt,
    question, instruction, input and text that a row has. `load_dataset_with_answers` keeps the
    answers, which a reward needs."""
    table = _read_table(dataset_name, split, subset, max_prompts, "max_prompts")
    found = [first_of(row, PROMPT_COLUMNS) for row in table.rows]
    prompts = [prompt for prompt in found if prompt is not None]
    _require_some(prompts, table, PROMPT_COLUMNS)
    return prompts


def load_dataset_with_answers(
    dataset_name: str,
    split: str = "train",
    max_samples: int | None = None,
    *,
    subset: str | None = None,
    extract_answer: Callable[[str], Any] | None = None,
) -> list[dict[str, Any]]:
    """`{"prompt": ..., "answer": ...}` of each row that has both; answers are in the first of the
    columns answer, completion, output, response and target. `extract_answer` is applied to
    each, such as `ludic.envs.maths.gsm8k_target`."""
    table = _read_table(dataset_name, split, subset, max_samples, "max_samples")
    pairs = [(first_of(row, PROMPT_COLUMNS), first_of(row, ANSWER_COLUMNS)) for row in table.rows]
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in pairs if prompt is not None and answer is not None]
    _require_some(rows, table, PROMPT_COLUMNS, ANSWER_COLUMNS)
    return rows if extract_answer is None else [{**row, "answer": extract_answer(row["answer"])} for row in rows]


def first_of(row: Mapping[str, Any], columns: Sequence[str]) -> Any:
    """The value of the first of the columns that the row has; None without any."""
    return next((row[column] for column in columns if row.get(column) is not None), None)


def _read_table(name: str, split: str, subset: str | None, limit: int | None, setting: str) -> Table:
    if limit is not None and limit < 1:
        raise ConfigError(f"{setting} ({limit}) must be at least 1; None reads every row")
    table = read_table(name, config=subset, split=split, draw=_FirstRows(limit))
    if not table.rows:
        raise DataError(f"{name} has no rows")
    return table


def _require_some(found: Sequence[Any], table: Table, *columns: Sequence[str]) -> None:
    """Raise DataError if no row has the columns; a warning counts those that have not."""
    needed = " and ".join(f"one of {', '.join(names)}" for names in columns)
    if not found:
        raise DataError(f"{table.name} has the columns {', '.join(table.rows[0])}; a row needs {needed}")
    if len(found) < len(table.rows):
        logger.warning(
            "%s: %d of %d rows are left out: a row needs %s", table.name, len(table.rows) - len(found), len(table.rows), needed
        )
