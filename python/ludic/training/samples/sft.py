"""Rows of a data file as samples for supervised fine-tuning. The loss is on what the model is to
say, and on nothing else.

A row is one of

    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}       loss on the assistant's messages
    {"prompt": "2+2=", "completion": "4"}                        loss on the completion and the end token; plain text, no template
    {"prompt": [messages], "completion": [messages]}             loss on the assistant's messages of the completion
    {"id": "r0", "steps": [{..., "trace": {...}}]}               a rollout: loss on the tokens that were sampled, as they were sampled
    {"input_ids": [...], "action_mask": [...]}                   tokens and mask, as they are

Conversations may carry `tools`, which the template gets, and `chat_template_kwargs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ludic.errors import DataError
from ludic.training.rollouts.log import rollout_of
from ludic.training.rollouts.to_samples import sample_from_step
from ludic.training.samples.conversations import AssistantTurns, ChatTokenizer, ChatTokens
from ludic.training.samples.text import prompt_and_completion
from ludic.training.types import SAWItem
from ludic.types import is_list_of

Row = Mapping[str, Any]


@dataclass(frozen=True)
class SFTItems:
    """Makes samples of rows.

    >>> items = SFTItems(tokenizer).of(read_jsonl("chats.jsonl"))

    Samples are named by their row (`rollout_id`), hold their tokens in int32 arrays and have weight
    1.
    """

    tokenizer: Any
    assistant_turns: AssistantTurns = "all"
    """Of conversations; see `ChatTokenizer`."""

    def of(self, rows: Iterable[tuple[str, Row]]) -> list[SAWItem]:
        """All samples of `(name, row)` pairs. Raises DataError, naming the row, for one that is
        none of the kinds above."""
        return [item for where, row in rows for item in self.of_row(row, where)]

    def of_row(self, row: Row, where: str) -> list[SAWItem]:
        for key, make in self._kinds().items():
            if row.get(key) is not None:
                return [_item(tokens, where, index) for index, tokens in enumerate(make(row, where))]
        raise DataError(
            f"{where} has the keys {', '.join(row) or '(none)'}; a row has messages, prompt and completion, steps (a rollout), or "
            "input_ids and action_mask"
        )

    def _kinds(self) -> dict[str, Callable[[Row, str], list[ChatTokens]]]:
        return {"messages": self._chat, "prompt": self._pair, "steps": _traces, "input_ids": _as_given}

    def _chat(self, row: Row, where: str, messages: Any = None, first: int = 0) -> list[ChatTokens]:
        messages = row["messages"] if messages is None else messages
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise DataError(f'{where}: messages must be a list of {{"role": ..., "content": ...}}')
        chat = ChatTokenizer(self.tokenizer, self.assistant_turns, row.get("chat_template_kwargs") or {})
        return chat.tokenize(messages, tools=row.get("tools"), first=first, where=where)

    def _pair(self, row: Row, where: str) -> list[ChatTokens]:
        prompt, completion = row["prompt"], row.get("completion")
        if isinstance(prompt, list) and isinstance(completion, list):
            return self._chat(row, where, [*prompt, *completion], first=len(prompt))
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise DataError(
                f"{where}: prompt and completion must both be text or both be lists of messages, not {type(prompt).__name__} and "
                f"{type(completion).__name__}"
            )
        return [prompt_and_completion(self.tokenizer, prompt, completion, where)]


def _traces(row: Row, where: str) -> list[ChatTokens]:
    rollout = rollout_of(row, where)
    items = [sample_from_step(rollout, step, 1.0) for step in rollout.steps]
    return [ChatTokens(item.input_ids, item.action_mask) for item in items]


def _as_given(row: Row, where: str) -> list[ChatTokens]:
    ids: Any = row["input_ids"]
    mask: Any = row.get("action_mask")
    if not is_list_of(ids, int) or not is_list_of(mask, int) or len(mask) != len(ids):
        raise DataError(f"{where}: input_ids must be a list of whole numbers, and action_mask one of as many 0 and 1")
    return [ChatTokens(ids, mask)]


def _item(tokens: ChatTokens, where: str, index: int) -> SAWItem:
    ids, mask = _column(tokens.input_ids, where), _column(tokens.action_mask, where)
    actions = int(np.count_nonzero(mask))
    if not actions:
        raise DataError(f"{where} has no token to train on")
    return SAWItem(
        input_ids=ids,
        attention_mask=_column([1] * len(ids), where),
        action_mask=mask,
        weight=1.0,
        meta={
            "rollout_id": where,
            "step_index": index,
            "completion_length": actions,
            "prompt_length": len(ids) - actions,
        },
    )


def _column(values: Sequence[int], where: str) -> Any:
    try:
        return np.array(values, dtype=np.int32)
    except OverflowError as error:
        raise DataError(f"{where}: token ids must be below 2**31: {error}") from error
