"""Conversations as token ids, with a mask over what the assistant says.

Two ways to know what is the assistant's. A template with `{% generation %}` says so itself: the
conversation is rendered once, and the spans that the template marks are laid over the tokens'
offsets, each up to its end token. A template without is rendered up to each assistant message and
with it: what the second has more than the first is the message. That holds on token ids only, and
only while each rendering begins with the one before; where it does not (a tokenizer that merges
across the border, a template that writes earlier turns otherwise once later ones follow), a
`DataError` says where, and no mask is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ludic.errors import ConfigError, DataError, RowError
from ludic.types import Message

AssistantTurns = Literal["all", "last", "each"]
ASSISTANT_TURNS: tuple[str, ...] = ("all", "last", "each")

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatTokens:
    """One conversation. Example: `<user>hi<assistant>yo<eos>` of a byte-level model trains
    `yo<eos>`."""

    input_ids: list[int]
    """[T] ids of the rendered conversation."""
    action_mask: list[int]
    """[T] 1 on what the assistant says."""


@dataclass(frozen=True)
class ChatTokenizer:
    """Renders conversations with the chat template of a tokenizer.

    >>> [tokens] = ChatTokenizer(tokenizer).tokenize([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}])
    """

    tokenizer: Any
    turns: AssistantTurns = "all"
    """Which assistant messages are trained: all of them in one sample; the last; or each in a
    sample of its own that ends with it, which holds for templates that rewrite earlier turns,
    too."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the template, for example `enable_thinking`."""

    def __post_init__(self) -> None:
        if self.turns not in ASSISTANT_TURNS:
            raise ConfigError(f"assistant_turns ({self.turns}) must be one of {', '.join(ASSISTANT_TURNS)}")

    def tokenize(
        self, messages: Sequence[Message], *, tools: Any = None, first: int = 0, where: str = "the conversation"
    ) -> list[ChatTokens]:
        """One sample, or with `turns="each"` one for every assistant message. Messages before
        number `first` are not trained.

        `where` names the row in errors. Raises DataError for a conversation without an assistant
        message to train.
        """
        spoken = [index for index, message in enumerate(messages) if message.get("role") == "assistant" and index >= first]
        if not spoken:
            raise DataError(f"{where} has no assistant message to train on; each row needs one")
        rendering = _Rendering(self.tokenizer, {**self.template_args, **({"tools": tools} if tools else {})}, where)
        if self.turns == "each":
            return [self._one(rendering, messages[: index + 1], [index]) for index in spoken]
        kept = spoken if self.turns == "all" else spoken[-1:]
        return [self._one(rendering, messages if self.turns == "all" else messages[: kept[0] + 1], kept)]

    def _one(self, rendering: _Rendering, messages: Sequence[Message], spoken: Sequence[int]) -> ChatTokens:
        make = rendering.marked if rendering.marks_generation else rendering.compared
        return make(messages, spoken)


@dataclass(frozen=True)
class _Rendering:
    """The template of one tokenizer at work on one row."""

    tokenizer: Any
    template_args: Mapping[str, Any]
    where: str

    @property
    def marks_generation(self) -> bool:
        return bool(_GENERATION.search(template_of(self.tokenizer)))

    def ids(self, messages: Sequence[Message], *, prompt: bool) -> list[int]:
        """Ids of `messages`; with `prompt`, up to where the assistant begins to speak."""
        return apply_template(self.tokenizer, messages, prompt=prompt, where=self.where, **self.template_args)

    def compared(self, messages: Sequence[Message], spoken: Sequence[int]) -> ChatTokens:
        """The mask from renderings that extend one another."""
        full = self.ids(messages, prompt=False)
        mask = [0] * len(full)
        for index in spoken:
            upto = full if index == len(messages) - 1 else self.ids(messages[: index + 1], prompt=False)
            self._check_extends(full, upto, f"the conversation up to message {index}", rewrites=True)
            start = self._prompt_length(upto, messages, index)
            end = end_of_turn(self.tokenizer, upto, start)
            if end == start:
                raise RowError(
                    f"{self.where}: assistant message {index} has no tokens; leave it out of the data", reason="empty_response"
                )
            mask[start:end] = [1] * (end - start)
        return ChatTokens(full, mask)

    def marked(self, messages: Sequence[Message], spoken: Sequence[int]) -> ChatTokens:
        """The mask from the spans that the template marks, those of the messages `spoken`."""
        text, spans = _render_marked(self.tokenizer, messages, self.template_args, self.where)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
        mask = [0] * len(ids)
        for span in self._spans_of(messages, spoken, spans):
            rows = self._rows_of(span, offsets, text)
            if rows:
                end = end_of_turn(self.tokenizer, ids[: rows[-1] + 1], rows[0])
                mask[rows[0] : end] = [1] * (end - rows[0])
        if not any(mask):
            raise DataError(f"{self.where}: the template's {{% generation %}} blocks cover no token of this conversation")
        return ChatTokens(ids, mask)

    def _spans_of(
        self, messages: Sequence[Message], spoken: Sequence[int], spans: Sequence[tuple[int, int]]
    ) -> Sequence[tuple[int, int]]:
        """The spans of the messages `spoken`. Where those are some of the assistant's, the
        template must mark each of its messages once; spans that touch count as one."""
        every = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        if len(every) == len(spoken):
            return spans
        one_each = spans if len(spans) == len(every) else _joined(spans)
        if len(one_each) != len(every):
            raise DataError(
                f"{self.where}: the template marks {len(one_each)} spans of {len(every)} assistant messages, which does not say which are "
                "to be trained; train all (assistant_turns=all), or mark each message once with {% generation %}"
            )
        return [span for index, span in zip(every, one_each, strict=True) if index in spoken]

    def _rows_of(self, span: tuple[int, int], offsets: Sequence[tuple[int, int]], text: str) -> list[int]:
        """The tokens that lie in a span of characters, which must not lie across its border."""
        start, end = span
        rows = [row for row, (a, b) in enumerate(offsets) if a < end and b > start]
        for row in rows:
            a, b = offsets[row]
            if a < start or b > end:
                raise DataError(
                    f"{self.where}: token {row} ({text[a:b]!r}) lies across the border of a {{% generation %}} block at character "
                    f"{start if a < start else end}; put the border where the tokenizer splits"
                )
        return rows

    def _prompt_length(self, full: list[int], messages: Sequence[Message], index: int) -> int:
        prompt = self.ids(messages[:index], prompt=True)
        self._check_extends(full, prompt, f"the prompt of assistant message {index}", rewrites=False)
        return len(prompt)

    def _check_extends(self, full: list[int], beginning: list[int], what: str, *, rewrites: bool) -> None:
        if full[: len(beginning)] == beginning:
            return
        at = next((i for i, (a, b) in enumerate(zip(full, beginning, strict=False)) if a != b), len(full))
        remedy = (
            "the template writes earlier turns otherwise once later ones follow; set assistant_turns=each or last, or mark what the "
            "assistant says with {% generation %} in the template"
            if rewrites
            else "the template or the tokenizer writes it otherwise once the answer follows; mark what the assistant says with "
            "{% generation %} in the template"
        )
        raise DataError(
            f"{self.where}: {what} must be a prefix of the whole on token ids, and is not from token {at} on "
            f"({self._shown(beginning, at)} became {self._shown(full, at)}); {remedy}"
        )

    def _shown(self, ids: Sequence[int], at: int) -> str:
        some = list(ids[at : at + 8])
        decode = getattr(self.tokenizer, "decode", None)
        return repr(decode(some)) if decode is not None else str(some)


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans that touch, as one."""
    result: list[tuple[int, int]] = []
    for start, end in spans:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], end)
        else:
            result.append((start, end))
    return result


def template_of(tokenizer: Any) -> str:
    """The chat template that renders; the one named `default` where there are several. Empty if
    it cannot be looked at."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    return template or ""


def apply_template(tokenizer: Any, messages: Sequence[Message], *, prompt: bool, where: str, **template_args: Any) -> list[int]:
    """Token ids of the rendered messages. What a template raises about a conversation becomes a
    DataError that names the row."""
    try:
        rendered = tokenizer.apply_chat_template(list(messages), add_generation_prompt=prompt, tokenize=True, **template_args)
    except Exception as error:  # a template is a programme of its own: it may raise anything
        raise _template_error(tokenizer, error, where) from error
    return list(rendered["input_ids"] if isinstance(rendered, Mapping) or hasattr(rendered, "keys") else rendered)


def end_of_turn(tokenizer: Any, ids: Sequence[int], start: int) -> int:
    """Where the assistant's message that begins at `start` ends: after its end token. What
    templates put behind that, a line break for example, is never sampled. Without an end token,
    the end of `ids`."""
    eos = getattr(tokenizer, "eos_token_id", None)
    return next((index + 1 for index in range(len(ids) - 1, start - 1, -1) if ids[index] == eos), len(ids))


def _render_marked(
    tokenizer: Any, messages: Sequence[Message], template_args: Mapping[str, Any], where: str
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and the spans of characters that lie in `{% generation %}` blocks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("a template with {% generation %} needs a fast tokenizer, which knows where in the text its tokens lie")
    rest = {**tokenizer.special_tokens_map, **template_args}
    try:
        texts, spans = render_jinja_template(
            conversations=[list(messages)],
            tools=rest.pop("tools", None),
            chat_template=template_of(tokenizer),
            return_assistant_tokens_mask=True,
            **rest,
        )
    except Exception as error:
        raise _template_error(tokenizer, error, where) from error
    return texts[0], [(int(start), int(end)) for start, end in spans[0]]


def _template_error(tokenizer: Any, error: Exception, where: str) -> DataError | ConfigError:
    if not getattr(tokenizer, "chat_template", True):
        return ConfigError(
            f"{where} is a conversation, and the tokenizer has no chat template; set chat_template=FILE.jinja, or give rows of prompt "
            "and completion"
        )
    return DataError(f"{where}: the chat template refuses this conversation: {type(error).__name__}: {error}")
