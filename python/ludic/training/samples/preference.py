"""Rows of preference data as pairs of samples.

A row has a `chosen` and a `rejected` response, and is of one of TRL's forms

    {"prompt": "2+2=", "chosen": "4", "rejected": "5"}                     plain text, no template
    {"chosen": "2+2=4", "rejected": "2+2=5"}                               the prompt is what both begin with
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}   conversations, by the chat template
    {"chosen": [messages], "rejected": [messages]}                         likewise

A text that stands as `prompt` beside conversations repeats what they begin with, unless they begin
with the assistant. Conversations may carry `tools`, which the template gets, and
`chat_template_kwargs`. Both samples end with the end token of the response: what a template puts
behind that is never sampled, and a reward model reads its score from the last token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from ludic.errors import ConfigError, DataError, RowError
from ludic.training.batching.preference import check_label, same_tokens
from ludic.training.samples.conversations import ChatTokenizer, ChatTokens
from ludic.training.samples.text import ended, prompt_and_completion, text_ids
from ludic.training.types import SAWItem
from ludic.types import Message

Row = Mapping[str, Any]


@dataclass(frozen=True)
class PreferenceItems:
    """Makes pairs of rows.

    >>> chosen, rejected = PreferenceItems(tokenizer).of_row({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "row 1", pair_id="p1")
    """

    tokenizer: Any
    use_chat_template: bool = False
    """Text, too, goes through the template: the prompt as what the user says, the response as
    the assistant's."""
    system_prompt: str | None = None
    """Begins conversations that have no system message."""
    max_length: int | None = None
    """Longer samples are cut. Text loses the beginning of its prompt; what the template wrote
    loses the end of its response."""
    as_arrays: bool = False
    """Tokens and masks are int32 arrays instead of lists: a seventh of the memory."""

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"max_length ({self.max_length}) must be >= 1")

    def of_row(self, row: Row, where: str, *, pair_id: str | int, label: float = 1.0) -> tuple[SAWItem, SAWItem]:
        """(chosen, rejected) samples with `pair_id`, `role` and `label` in their `meta`. Raises
        DataError, naming the row, for one that is none of the forms above; RowError for one that
        has an empty response, two that are the same tokens, or a prompt that leaves no room for
        a response."""
        label = check_label(label, where)
        chosen, rejected = row.get("chosen"), row.get("rejected")
        if isinstance(chosen, str) and isinstance(rejected, str):
            tokens = self._texts(row, chosen, rejected, where)
        elif _are_messages(chosen) and _are_messages(rejected):
            tokens = self._conversations(row, chosen, rejected, where)
        else:
            raise DataError(
                f"{where}: chosen and rejected must both be text or both be lists of messages, not {type(chosen).__name__} and "
                f"{type(rejected).__name__}"
            )
        told = {"pair_id": pair_id, "label": label, **_prompt_digest(row.get("prompt"))}
        metas = ({**told, "role": role} for role in ("chosen", "rejected"))
        one, other = (_item(cut, meta, as_arrays=self.as_arrays) for cut, meta in zip(tokens, metas, strict=True))
        if same_tokens(one, other):
            within = f" within max_length ({self.max_length})" if "truncation" in one.meta or "truncation" in other.meta else ""
            message = f"{where}: chosen and rejected are the same{within}; such a pair says nothing"
            raise RowError(message, reason="same_responses_when_cut" if within else "same_responses")
        return one, other

    def _texts(self, row: Row, chosen: str, rejected: str, where: str) -> list[CutTokens]:
        prompt = row.get("prompt")
        if prompt is not None and not isinstance(prompt, str):
            raise DataError(f"{where}: prompt must be text where the responses are, not {type(prompt).__name__}")
        if self.use_chat_template:
            if not prompt:
                raise DataError(
                    f"{where} has no prompt, which use_chat_template needs: it does not see where in the text it ends"
                )
            said = [_spoken(response, role, where) for response, role in ((chosen, "chosen"), (rejected, "rejected"))]
            return [self._conversation(row, [{"role": "user", "content": prompt}], [message], where) for message in said]
        if prompt:
            made = [prompt_and_completion(self.tokenizer, prompt, text, where) for text in (chosen, rejected)]
        else:
            made = _split_where_they_part([ended(self.tokenizer, text_ids(self.tokenizer, text)) for text in (chosen, rejected)])
        return [cut_from_the_left(tokens, self.max_length) for tokens in made]

    def _conversations(self, row: Row, chosen: list[Message], rejected: list[Message], where: str) -> list[CutTokens]:
        prompt = row.get("prompt")
        if isinstance(prompt, str) and chosen[0].get("role") == "assistant":
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, list):
            shared = common_messages(chosen, rejected)
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        return [self._conversation(row, prompt, answer, where) for answer in (chosen, rejected)]

    def _conversation(self, row: Row, prompt: Sequence[Message], answer: Sequence[Message], where: str) -> CutTokens:
        begun = with_system(prompt, self.system_prompt)
        template_args = row.get("chat_template_kwargs") or {}
        tokens = conversation_tokens(self.tokenizer, begun, answer, where, tools=row.get("tools"), **template_args)
        return cut_from_the_right(tokens, self.max_length, where)


def _prompt_digest(prompt: object) -> dict[str, str]:
    """What pairs of one prompt have in common, however their samples were cut; nothing where the
    prompt is not given."""
    if not prompt:
        return {}
    written = json.dumps(prompt, sort_keys=True, default=str).encode()
    return {"prompt_digest": hashlib.blake2b(written, digest_size=16).hexdigest()}


@dataclass(frozen=True)
class CutTokens:
    """A sample that fits."""

    tokens: ChatTokens
    cut: dict[str, Any]
    """What its `meta` says of the cut; empty where there was none."""


def conversation_tokens(
    tokenizer: Any, prompt: Sequence[Message], answer: Sequence[Message], where: str, *, tools: Any = None, **template_args: Any
) -> ChatTokens:
    """The conversation up to the end token of the last message of `answer`, by the chat
    template; the action is what the assistant says in `answer`."""
    if not answer or answer[-1].get("role") != "assistant":
        raise DataError(f"{where}: a response must end with an assistant message")
    chat = ChatTokenizer(tokenizer, "all", template_args)
    [tokens] = chat.tokenize([*prompt, *answer], tools=tools, first=len(prompt), where=where)
    end = len(tokens.action_mask) - tokens.action_mask[::-1].index(1)
    return ChatTokens(tokens.input_ids[:end], tokens.action_mask[:end])


def with_system(prompt: Sequence[Message], system_prompt: str | None) -> list[Message]:
    """`prompt`, begun by the system prompt if it has none of its own."""
    if system_prompt is None or (prompt and prompt[0].get("role") == "system"):
        return list(prompt)
    return [{"role": "system", "content": system_prompt}, *prompt]


def common_messages(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """How many messages both begin with; each keeps one."""
    most = min(len(chosen), len(rejected)) - 1
    return next((index for index in range(most) if chosen[index] != rejected[index]), most)


def cut_from_the_left(tokens: ChatTokens, max_length: int | None) -> CutTokens:
    """The last `max_length` tokens: the prompt loses its beginning first, and the completion
    only when it is too long by itself."""
    total, actions = len(tokens.input_ids), sum(tokens.action_mask)
    if max_length is None or total <= max_length:
        return CutTokens(tokens, {})
    kept = ChatTokens(tokens.input_ids[-max_length:], tokens.action_mask[-max_length:])
    return CutTokens(kept, _cut_facts(total, max_length, prompt=actions < total, completion=actions > max_length))


def cut_from_the_right(tokens: ChatTokens, max_length: int | None, where: str) -> CutTokens:
    """The first `max_length` tokens. Raises RowError where no token of the completion is among
    them."""
    total, prompt = len(tokens.input_ids), tokens.action_mask.index(1)
    if max_length is None or total <= max_length:
        return CutTokens(tokens, {})
    if prompt >= max_length:
        message = (
            f"{where}: its prompt has {prompt} tokens and fills max_length ({max_length}); raise max_length or leave the row out"
        )
        raise RowError(message, reason="prompt_too_long")
    kept = ChatTokens(tokens.input_ids[:max_length], tokens.action_mask[:max_length])
    return CutTokens(kept, _cut_facts(total, max_length, prompt=False, completion=True))


def _cut_facts(total: int, kept: int, *, prompt: bool, completion: bool) -> dict[str, Any]:
    return {
        "truncation": {
            "original_len": total,
            "truncated_len": kept,
            "prompt_truncated": prompt,
            "completion_truncated": completion,
        },
        "truncated": True,
        "truncation_reason": "max_length",
        "seq_len_truncated": True,
        "seq_len_original": total,
        "seq_len_retained": kept,
        "seq_len_retained_frac": kept / total,
    }


def _split_where_they_part(both: list[list[int]]) -> list[ChatTokens]:
    """The prompt is what both begin with, on token ids; each keeps one token."""
    most = max(0, min(map(len, both)) - 1)
    shared = next((index for index in range(most) if both[0][index] != both[1][index]), most)
    return [ChatTokens(ids, [0] * shared + [1] * (len(ids) - shared)) for ids in both]


def _spoken(text: str, role: str, where: str) -> Message:
    if not text:
        raise RowError(f"{where} has an empty {role} response; leave the row out", reason="empty_response")
    return {"role": "assistant", "content": text}


def _are_messages(value: Any) -> TypeGuard[list[Message]]:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _item(found: CutTokens, meta: dict[str, Any], *, as_arrays: bool) -> SAWItem:
    ids, mask = found.tokens.input_ids, found.tokens.action_mask
    lengths = {"completion_length": sum(mask), "prompt_length": len(mask) - sum(mask)}
    column: Any = (lambda values: np.array(values, dtype=np.int32)) if as_arrays else list
    return SAWItem(
        input_ids=column(ids),
        attention_mask=column([1] * len(ids)),
        action_mask=column(mask),
        weight=1.0,
        meta={**meta, **lengths, **found.cut},
    )
