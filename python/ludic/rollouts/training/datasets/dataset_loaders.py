"""Data sets by hub id or from files: samples for fine-tuning, prompts, and prompts with answers;
and files of samples.

The trained tokens of a conversation are the assistant's, its end token included:
`ludic.training.samples` finds these tokens, with any chat template. Without a template, a prompt
and a response are plain text.

    tokens   <user> hi <assistant> yo <eos> \\n
    mask        0    0      0       1   1    0
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from ludic.data.sources import Draw, Table, read_table
from ludic.errors import ConfigError, DataError, RowError
from ludic.files.jsonl import read_jsonl, write_jsonl
from ludic.inference.prompts.template import read_template, read_template_kwargs
from ludic.rollouts.training.packed_columns import COLUMNS
from ludic.rollouts.training.types import Prompt, Sample, SampleStatus
from ludic.training.samples.conversations import ChatTokenizer, ChatTokens, tokenize_prompt_completion
from ludic.types import Message

logger = logging.getLogger(__name__)

Span = tuple[int, int]
"""(first token, token after the last)"""


def tokenize_conversation(messages: Sequence[Message], tokenizer: Any, max_length: int = 2048) -> tuple[list[int], list[Span]]:
    """(tokens, spans without loss): the spans cover everything that the assistant does not say,
    headers of its turns included.

    Raises RowError for a conversation of more than `max_length` tokens; DataError for one without
    an assistant message, and for a template under which its tokens cannot be found.
    """
    tokens = _tokenize_messages(messages, tokenizer, max_length, "the conversation", {})
    spans, start = [], 0
    for value, run in groupby(tokens.action_mask):  # mask 0 0 1 0 has the spans (0, 2) and (3, 4)
        end = start + len(list(run))
        spans += [] if value else [(start, end)]
        start = end
    return tokens.input_ids, spans


def compute_loss_mask(tokens: Sequence[int], user_message_spans: Sequence[Span]) -> list[float]:
    """1 on every token outside of the spans, 0 inside. Example: 4 tokens and the span (0, 2) have
    the mask 0 0 1 1."""
    mask = [1.0] * len(tokens)
    for start, end in user_message_spans:
        if not 0 <= start <= end <= len(tokens):
            raise DataError(f"the span ({start}, {end}) is not one of {len(tokens)} tokens")
        mask[start:end] = [0.0] * (end - start)
    return mask


def prepare_sft_sample(prompt: Prompt, response: str, tokenizer: Any, max_length: int = 2048) -> Sample:
    """The sample of a prompt and its answer. Raises RowError for more than `max_length` tokens."""
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return make_sample([*before, {"role": "assistant", "content": response}], tokenizer, max_length, "the sample", prompt=prompt)


def make_sample(
    messages: Sequence[Message],
    tokenizer: Any,
    max_length: int,
    where: str,
    *,
    prompt: Prompt | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Sample:
    """The sample of a conversation; without a tokenizer, without tokens. Its prompt is what comes
    before the last message of the assistant, its response that message."""
    said = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not said:
        raise DataError(f"{where} has no assistant message to train on; each row needs one")
    before, answer = list(messages[: said[-1]]), messages[said[-1]].get("content") or ""
    sample = Sample(before if prompt is None else prompt, answer, status=SampleStatus.COMPLETED)
    if tokenizer is not None:
        tokens = _tokenize_messages(messages, tokenizer, max_length, where, template_kwargs or {})
        sample.tokens, sample.loss_mask = tokens.input_ids, [float(value) for value in tokens.action_mask]
    return sample


def _tokenize_messages(
    messages: Sequence[Message], tokenizer: Any, max_length: int, where: str, template_kwargs: Mapping[str, Any]
) -> ChatTokens:
    """With the tokenizer's chat template; without one, only a prompt and an answer, as text."""
    if read_template(tokenizer):
        tokens = ChatTokenizer(tokenizer, "all", template_kwargs).tokenize(messages, where=where)[0]
    elif [message.get("role") for message in messages] == ["user", "assistant"]:
        tokens = tokenize_prompt_completion(tokenizer, messages[0]["content"], messages[1]["content"], where)
    else:
        raise ConfigError(f"{where} is a conversation, and the tokenizer has no chat template; set tokenizer.chat_template")
    if len(tokens.input_ids) > max_length:
        raise RowError(f"{where} has {len(tokens.input_ids)} tokens; raise max_length ({max_length})", reason="prompt_too_long")
    return tokens


def export_samples_to_jsonl(samples: Sequence[Sample], output_path: str | Path, include_tokens: bool = False) -> None:
    """One sample a line, as `Sample.to_dict`; tokens, mask and log-probabilities on request."""
    rows = (sample.to_dict() for sample in samples)
    left_out = () if include_tokens else COLUMNS
    write_jsonl(output_path, ({key: value for key, value in row.items() if key not in left_out} for row in rows))


def load_samples_from_jsonl(input_path: str | Path, limit: int | None = None) -> list[Sample]:
    """The samples of `export_samples_to_jsonl`, at most the first `limit`."""
    return [Sample.from_dict(row) for _, row in islice(read_jsonl(input_path), limit)]


def export_samples_to_huggingface_format(samples: Sequence[Sample], output_path: str | Path) -> None:
    """One conversation a line, `{"messages": [...], "metadata": {...}}`, which `load_sft_dataset`,
    `ludic sft` and the `datasets` library read."""
    rows = []
    for sample in samples:
        prompt = sample.prompt if isinstance(sample.prompt, list) else [{"role": "user", "content": sample.prompt}]
        messages = [*prompt, {"role": "assistant", "content": sample.response}]
        rows.append({"messages": messages, "metadata": sample.metadata})
    write_jsonl(output_path, rows)


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
