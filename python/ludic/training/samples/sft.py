"""Makes samples for supervised fine-tuning from rows of a data file. Only the model's answers are
trained.

A row has one of these forms:

    {"messages": [...]}
        A conversation: the loss is on the assistant's messages.
    {"prompt": "2+2=", "completion": "4"}
        Plain text, no chat template: the loss is on the completion and the end token.
    {"prompt": [...], "completion": [...]}
        Lists of messages: the loss is on the assistant's messages in the completion.
    {"id": "r0", "steps": [{..., "trace": {...}}]}
        A rollout: the loss is on the sampled tokens.
    {"input_ids": [...], "action_mask": [...]}
        Tokens and their mask, used unchanged.
    {"instruction": "Add.", "input": "2 2", "output": "4"}
        Alpaca: the loss is on the output.
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
        ShareGPT: the loss is on what gpt says, and on its function calls.
    {"text": "..."}
        Plain text: the loss is on every token after the first.

Conversations can also have `tools` and `chat_template_kwargs`, which are passed to the template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from ludic.data.formats import (
    AUTO,
    convert_alpaca,
    convert_alpaca_to_text,
    convert_sharegpt,
    detect_format,
    list_formats,
    read_tools,
)
from ludic.errors import DataError
from ludic.images.content import find_message_digests, intern_prompt
from ludic.images.store import current_store
from ludic.inference.prompts.template import ChatTemplate, find_turn_end, read_template, read_template_kwargs
from ludic.training.rollouts.log import parse_rollout
from ludic.training.rollouts.to_samples import sample_from_step
from ludic.training.samples.conversations import (
    AssistantTurns,
    ChatTokenizer,
    ChatTokens,
    tokenize_document,
    tokenize_prompt_completion,
)
from ludic.training.samples.preference import add_system_prompt, conversation_tokens, truncate_right
from ludic.training.types import SAWItem
from ludic.types import Message, is_list_of

Row = Mapping[str, Any]


@dataclass(frozen=True)
class SFTItems:
    """Makes samples from rows.

    >>> items = SFTItems(tokenizer).of(read_jsonl("chats.jsonl"))

    The `rollout_id` of a sample is the name of its row; tokens are int32 arrays; the weight is 1.
    """

    tokenizer: Any
    assistant_turns: AssistantTurns = "all"
    """Which assistant messages of a conversation are trained; see `ChatTokenizer`."""

    row_format: str = AUTO
    """The format of all rows, one of `ludic.data.formats.FORMATS`; `auto`: by the columns."""
    max_tokens: int | None = None
    """Longer plain texts are divided into samples of at most this number of tokens."""

    def of(self, rows: Iterable[tuple[str, Row]]) -> list[SAWItem]:
        """Return the samples of all `(name, row)` pairs. Raises DataError, naming the row, for a
        row of another form."""
        return [item for where, row in rows for item in self.of_row(row, where)]

    def of_row(self, row: Row, where: str) -> list[SAWItem]:
        """Return the samples of one row; `where` is its name."""
        tokenizers: dict[str, Callable[[Row, str], list[ChatTokens]]] = {
            "messages": self._tokenize_messages,
            "sharegpt": self._tokenize_sharegpt,
            "prompt_completion": self._tokenize_prompt_completion,
            "alpaca": self._tokenize_alpaca,
            "rollout": _read_rollout,
            "tokens": _read_ids,
            "text": self._tokenize_text,
        }
        name = detect_format(row) if self.row_format == AUTO else self.row_format
        if name is None:
            raise DataError(f"{where} has the columns {', '.join(row) or '(none)'}, which are no format ({list_formats()})")
        items = [_make_item(tokens, where, index) for index, tokens in enumerate(tokenizers[name](row, where))]
        if name == "text":  # each text is a prompt of its own, and stays whole when rows are held out
            digest = sha256(row["text"].encode()).hexdigest()[:16]
            for item in items:
                item.meta.update(prompt_digest=digest, is_continued=item is not items[-1])
        return items

    def _tokenize_messages(self, row: Row, where: str) -> list[ChatTokens]:
        return self._tokenize_conversation(row.get("messages"), row, where)

    def _tokenize_sharegpt(self, row: Row, where: str) -> list[ChatTokens]:
        return self._tokenize_conversation(convert_sharegpt(row, where), {**row, "tools": read_tools(row, where)}, where)

    def _tokenize_alpaca(self, row: Row, where: str) -> list[ChatTokens]:
        if read_template(self.tokenizer) or row.get("images"):
            return self._tokenize_conversation(convert_alpaca(row, where), {**row, "tools": None}, where)
        return [tokenize_prompt_completion(self.tokenizer, *convert_alpaca_to_text(row, where), where)]

    def _tokenize_text(self, row: Row, where: str) -> list[ChatTokens]:
        text = row.get("text")
        if not isinstance(text, str):
            raise DataError(f"{where}: its text must be text, not {type(text).__name__}")
        return tokenize_document(self.tokenizer, text, self.max_tokens, where)

    def _tokenize_conversation(self, messages: Any, row: Row, where: str, first: int = 0) -> list[ChatTokens]:
        """Tokenise a conversation; messages before index `first` are not trained."""
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise DataError(f'{where}: messages must be a list of {{"role": ..., "content": ...}}')
        if row.get("images") and not find_message_digests(messages):  # where the images are is known only now
            shown = intern_prompt(messages, current_store(), images=row["images"], where=f"{where}: ")
            return self._tokenize_conversation(shown, row, where, first)
        chat = ChatTokenizer(self.tokenizer, self.assistant_turns, read_template_kwargs(row, where))
        samples = chat.tokenize(messages, tools=row.get("tools"), first=first, where=where)
        chat.check_calls(messages, tools=row.get("tools"), where=where)
        return samples

    def _tokenize_prompt_completion(self, row: Row, where: str) -> list[ChatTokens]:
        prompt, completion = row.get("prompt"), row.get("completion")
        if isinstance(prompt, list) and isinstance(completion, list):
            return self._tokenize_conversation([*prompt, *completion], row, where, first=len(prompt))
        if "prompt" not in row or "completion" not in row:
            absent = "completion" if "prompt" in row else "prompt"
            raise DataError(f"{where}: prompt and completion belong together, and {absent} is missing; it has {', '.join(row)}")
        if not isinstance(prompt, str) or not isinstance(completion, str):
            kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
            raise DataError(f"{where}: prompt and completion must both be text or both be lists of messages, not {kinds}")
        return [tokenize_prompt_completion(self.tokenizer, prompt, completion, where)]


def _read_rollout(row: Row, where: str) -> list[ChatTokens]:
    rollout = parse_rollout(row, where)
    items = [sample_from_step(rollout, step, 1.0) for step in rollout.steps]
    return [ChatTokens(item.input_ids, item.action_mask, item.images) for item in items]


def _read_ids(row: Row, where: str) -> list[ChatTokens]:
    ids: Any = row.get("input_ids")
    mask: Any = row.get("action_mask")
    if not is_list_of(ids, int) or not is_list_of(mask, int) or len(mask) != len(ids):
        raise DataError(f"{where}: input_ids must be a list of whole numbers, action_mask a list of 0 and 1 of that length")
    return [ChatTokens(ids, mask)]


def _make_item(tokens: ChatTokens, where: str, index: int) -> SAWItem:
    ids, mask = _to_array(tokens.input_ids, where), _to_array(tokens.action_mask, where)
    num_actions = int(np.count_nonzero(mask))
    if not num_actions:
        raise DataError(f"{where} has no token to train on")
    return SAWItem(
        input_ids=ids,
        attention_mask=_to_array([1] * len(ids), where),
        action_mask=mask,
        weight=1.0,
        meta={
            "rollout_id": where,
            "step_index": index,
            "completion_length": num_actions,
            "prompt_length": len(ids) - num_actions,
        },
        images=tokens.images,
    )


def _to_array(values: Sequence[int], where: str) -> Any:
    try:
        return np.array(values, dtype=np.int32)
    except OverflowError as error:
        raise DataError(f"{where}: token ids must be below 2**31: {error}") from error


@dataclass(frozen=True)
class ChatTemplateResult:
    """A conversation of two turns. Example: `<user>hi<assistant>yo<eos>` has `prompt_len` 4 with a
    byte-level tokenizer whose roles are one token each."""

    tokens: list[int]
    """Ids, up to the end token of the completion."""
    text: str
    """The rendered text up to the same end token; never truncated."""
    prompt_len: int
    """Number of tokens before the completion."""
    truncation_meta: dict[str, Any] | None
    """The entries of a sample's `meta` about the truncation; None if nothing was truncated."""


def tokenize_with_chat_template(
    tokenizer: Any, prompt: str, completion: str, *, system_prompt: str | None = None, max_length: int | None = None
) -> ChatTemplateResult:
    """Tokenise the conversation of the user message `prompt` and the assistant message
    `completion`, truncated on the right to `max_length`. Raises DataError for an empty
    completion, and for a prompt that fills `max_length` by itself."""
    question, answer = _turns(prompt, completion, system_prompt)
    full = conversation_tokens(tokenizer, question, answer, "the conversation")
    truncated = truncate_right(full, max_length, "the conversation")
    text = format_chat_template_text(tokenizer, prompt, completion, system_prompt=system_prompt)
    return ChatTemplateResult(truncated.tokens.input_ids, text, full.action_mask.index(1), truncated.cut or None)


def format_chat_template_text(tokenizer: Any, prompt: str, completion: str, *, system_prompt: str | None = None) -> str:
    """Return the conversation as text, up to the end token of the completion, for a server that
    tokenises text itself.

    Example: `<user>hi<assistant>yo<eos>\\n` is cut after `<eos>`. An `<eos>` in the prompt does not
    count.
    """
    question, answer = _turns(prompt, completion, system_prompt)
    template, turn_end = ChatTemplate(tokenizer), find_turn_end(tokenizer)
    text = str(template.apply([*question, *answer], prompt=False, tokenize=False))
    rendered_prompt = str(template.apply(question, prompt=True, tokenize=False))
    end = "" if turn_end.token is None else str(tokenizer.decode([turn_end.token]))
    place = text.rfind(end) if end else -1
    closed = text + end if turn_end.is_open else text
    return text[: place + len(end)] if end and place >= len(rendered_prompt) else closed


def _turns(prompt: str, completion: str, system_prompt: str | None) -> tuple[list[Message], list[Message]]:
    if not completion:
        raise DataError("the completion is empty; there is nothing to score")
    return add_system_prompt([{"role": "user", "content": prompt}], system_prompt), [{"role": "assistant", "content": completion}]
