"""Samples for supervised fine-tuning from conversations, and files of samples.

The trained tokens are the assistant's, its end token included: `ludic.training.samples` finds
these tokens, with any chat template. Without a template, a prompt and a response are plain text.

    tokens   <user> hi <assistant> yo <eos> \\n
    mask        0    0      0       1   1    0
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from ludic.errors import ConfigError, DataError, RowError
from ludic.files.jsonl import read_jsonl, write_jsonl
from ludic.inference.prompts.template import read_template
from ludic.rollouts.training.packed_columns import COLUMNS
from ludic.rollouts.training.types import Prompt, Sample, SampleStatus
from ludic.training.samples.conversations import ChatTokenizer, ChatTokens
from ludic.training.samples.text import tokenize_prompt_completion
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
        raise ConfigError(
            f"{where} is a conversation, and the tokenizer has no chat template; set tokenizer.chat_template, or give rows of one "
            "prompt and one answer"
        )
    if len(tokens.input_ids) > max_length:
        raise RowError(
            f"{where} has {len(tokens.input_ids)} tokens, more than max_length ({max_length}); raise max_length, or leave it out",
            reason="prompt_too_long",
        )
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
