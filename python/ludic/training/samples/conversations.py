"""Tokenises conversations, with a mask on the assistant's tokens, and plain text.

There are two ways to find the assistant's tokens:

- A template with `{% generation %}` marks them. The conversation is rendered once, and the marked
  spans of characters are mapped to tokens by the tokenizer's offsets, each up to its end token.
- Any other template is rendered twice for each assistant message, without and with the message: the
  additional tokens are the message. The ids of each rendering must begin with the ids of the
  previous one. If they do not (because the tokenizer merges characters of two messages into one
  token, or because the template renders earlier turns differently when later ones follow), a
  `DataError` says where.

    tokens   <user> hi <assistant> yo <eos> \n
    mask        0    0      0       1   1    0
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ludic.errors import ConfigError, DataError, RowError, check_value
from ludic.images.content import find_message_digests
from ludic.inference.prompts.images import check_texts, expand_markers, find_processor, find_spans
from ludic.inference.prompts.template import ChatTemplate, begin_text, find_turn_end, read_template
from ludic.types import ImageSpan, Message

AssistantTurns = Literal["all", "last", "each"]
ASSISTANT_TURNS: tuple[str, ...] = ("all", "last", "each")

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatTokens:
    """One tokenised conversation. In `<user>hi<assistant>yo<eos>` the mask is 1 on `yo<eos>`."""

    input_ids: list[int]
    """[T] ids of the rendered conversation."""
    action_mask: list[int]
    """[T] 1 on the assistant's tokens."""
    images: tuple[ImageSpan, ...] = ()
    """The images of the conversation, whose placeholders are not trained."""


@dataclass(frozen=True)
class ChatTokenizer:
    """Tokenises conversations with the chat template of a tokenizer.

    >>> messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    >>> [tokens] = ChatTokenizer(tokenizer).tokenize(messages)
    """

    tokenizer: Any
    turns: AssistantTurns = "all"
    """Which assistant messages are trained: `all` of them in one sample, only the `last`, or `each`
    in a separate sample that ends with it. `each` also works with templates that rewrite earlier
    turns."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the template, for example `enable_thinking`."""

    def __post_init__(self) -> None:
        check_value("assistant_turns", self.turns, choices=ASSISTANT_TURNS)

    def tokenize(
        self, messages: Sequence[Message], *, tools: Any = None, first: int = 0, where: str = "the conversation"
    ) -> list[ChatTokens]:
        """Return one sample, or with `turns="each"` one sample per assistant message. Messages
        before index `first` are not trained. `where` names the row in errors.

        Raises DataError for a conversation without an assistant message to train, and for tools
        that the template leaves out.

        Example: in user, assistant, user, assistant the assistant's indices are 1 and 3. `all`
        trains both, `last` trains 3, and `each` gives messages [0, 1] and [0, 1, 2, 3].
        """
        assistant = [index for index, message in enumerate(messages) if message.get("role") == "assistant" and index >= first]
        if not assistant:
            raise DataError(f"{where} has no assistant message to train on; each row needs one")
        rendering = self._render(tools, where)
        if tools and rendering.ids(messages) == self._render(None, where).ids_or_none(messages):
            # the model would be trained as if there were none
            raise DataError(f"{where} has tools, which the chat template leaves out; set chat_template to one with `tools`")
        if self.turns == "all":
            return [rendering.tokenize(messages, assistant)]
        ends = assistant if self.turns == "each" else assistant[-1:]
        return [rendering.tokenize(messages[: index + 1], [index]) for index in ends]

    def check_calls(self, messages: Sequence[Message], *, tools: Any = None, where: str = "the conversation") -> None:
        """Raise DataError if the template leaves out the messages' tool calls: the model would be
        trained on empty answers."""
        if not any(message.get("tool_calls") for message in messages):
            return
        without = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        rendering = self._render(tools, where)
        if rendering.ids(messages) == rendering.ids_or_none(without):
            raise DataError(
                f"{where} has tool calls, which the chat template leaves out; set chat_template to one with tool_calls"
            )

    def _render(self, tools: Any, where: str) -> _Rendering:
        template_args = {**self.template_args, **({"tools": tools} if tools else {})}
        return _Rendering(self.tokenizer, template_args, where)


@dataclass(frozen=True)
class _Rendering:
    """Renders one row with the tokenizer's template. `trained` in its methods are the indices of
    the assistant messages to train."""

    tokenizer: Any
    template_args: Mapping[str, Any]
    where: str

    def tokenize(self, messages: Sequence[Message], trained: Sequence[int]) -> ChatTokens:
        """Tokenise the messages, with a mask on those at the indices `trained`."""
        marks_generation = _GENERATION.search(read_template(self.tokenizer, self.template_args.get("tools")))
        return self._mask_by_marks(messages, trained) if marks_generation else self._mask_by_prefixes(messages, trained)

    def ids(self, messages: Sequence[Message], *, prompt: bool = False) -> list[int]:
        """Return the ids of `messages`; with `prompt`, followed by the header of the assistant's
        next message."""
        return apply_template(self.tokenizer, messages, prompt=prompt, where=self.where, **self.template_args)

    def ids_or_none(self, messages: Sequence[Message]) -> list[int] | None:
        """The ids of messages from which something was left out; None for a template that asks for
        it."""
        try:
            return self.ids(messages)
        except DataError:
            return None

    def _mask_by_prefixes(self, messages: Sequence[Message], trained: Sequence[int]) -> ChatTokens:
        """Compute the mask from renderings, each a prefix of the next.

        Example: the prompt renders to [1, 2, 3] and the conversation to [1, 2, 3, 7, 0, 9] with end
        token 0. The message is the slice 3:5, [7, 0]; the 9 after its end token is not trained.

        An answer that the template leaves open is ended by the token with which the next message
        begins; it is added to the last answer.
        """
        full, turn_end = self.ids(messages), find_turn_end(self.tokenizer)
        mask = [0] * len(full)
        for index in trained:
            is_last = index == len(messages) - 1
            up_to_here = full if is_last else self.ids(messages[: index + 1])
            prompt = self.ids(messages[:index], prompt=True)
            self._check_is_prefix(prompt, up_to_here, f"the prompt of assistant message {index}", rewrites=False)
            start = len(prompt)
            end = turn_end.find(up_to_here, start)
            self._check_is_prefix(up_to_here[:end], full, f"the conversation up to message {index}", rewrites=True)
            if end == start:
                raise RowError(f"{self.where}: assistant message {index} has no tokens", reason="empty_response")
            if turn_end.is_open and up_to_here[end - 1] not in turn_end.ids:
                if is_last and turn_end.token is not None:
                    full, mask = [*full, turn_end.token], [*mask, 0]
                end += full[end] in turn_end.ids
            mask[start:end] = [1] * (end - start)
        return ChatTokens(full, mask, find_images(self.tokenizer, full, messages))

    def _mask_by_marks(self, messages: Sequence[Message], trained: Sequence[int]) -> ChatTokens:
        """Compute the mask from the spans of characters that the template marks.

        Example: `<u>hi<a>yo!` with the span (8, 11) and tokens at (0, 5), (5, 8), (8, 10), (10, 11)
        has the mask [0, 0, 1, 1].
        """
        text, spans = _render_marked(self.tokenizer, messages, self.template_args, self.where)
        if digests := find_message_digests(messages):
            shown, images = text, require_images(self.tokenizer, self.where)
            text = expand_images(self.tokenizer, text, messages, self.where)
            growths = [len(images.process(digest).block) - len(images.marker) for digest in digests]
            moved = [[at + sum(growths[: shown.count(images.marker, 0, at)]) for at in span] for span in spans]
            spans = [(start, end) for start, end in moved]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
        mask = [0] * len(ids)
        for span in self._select_spans(messages, trained, spans):
            tokens = self._tokens_in_span(span, offsets, text)
            if tokens:
                end = find_turn_end(self.tokenizer).find(ids[: tokens[-1] + 1], tokens[0])
                mask[tokens[0] : end] = [1] * (end - tokens[0])
        if not any(mask):
            raise DataError(f"{self.where}: the template's {{% generation %}} blocks cover no token of this conversation")
        return ChatTokens(ids, mask, find_images(self.tokenizer, ids, messages))

    def _select_spans(
        self, messages: Sequence[Message], trained: Sequence[int], spans: Sequence[tuple[int, int]]
    ) -> Sequence[tuple[int, int]]:
        """Return the spans of the trained messages. If only some of the assistant's messages are
        trained, the template must mark each message once; adjacent spans count as one.

        Example: assistant messages 1 and 3 with the spans (5, 7) and (12, 14); `trained` [3] gives
        [(12, 14)].
        """
        assistant = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        if len(assistant) == len(trained):
            return spans
        one_each = spans if len(spans) == len(assistant) else _join_touching(spans)
        if len(one_each) != len(assistant):
            raise DataError(
                f"{self.where}: the template marks {len(one_each)} spans for {len(assistant)} assistant messages; set assistant_turns=all"
            )
        return [span for index, span in zip(assistant, one_each, strict=True) if index in trained]

    def _tokens_in_span(self, span: tuple[int, int], offsets: Sequence[tuple[int, int]], text: str) -> list[int]:
        """Return the indices of the tokens in a span of characters. Raises DataError if a token
        crosses a border of the span. Example: span (2, 5) and offsets (0, 2), (2, 4), (4, 5) give
        [1, 2]; a token at (1, 3) would cross the border."""
        start, end = span
        tokens = [token for token, (a, b) in enumerate(offsets) if a < end and b > start]
        for token in tokens:
            a, b = offsets[token]
            if a < start or b > end:
                raise DataError(
                    f"{self.where}: token {token} ({text[a:b]!r}) crosses a {{% generation %}} border at {start if a < start else end}"
                )
        return tokens

    def _check_is_prefix(self, prefix: list[int], full: list[int], what: str, *, rewrites: bool) -> None:
        """Raise DataError, naming the first token that differs, unless `prefix` is a prefix of
        `full`. Example: [1, 2, 3] differs from [1, 2, 4, 5] at token 2."""
        if full[: len(prefix)] == prefix:
            return
        at = next((i for i, (a, b) in enumerate(zip(full, prefix, strict=False)) if a != b), len(full))
        remedy = (
            "the template renders earlier turns differently when later ones follow; set assistant_turns=each or last, or mark what the "
            "assistant says with {% generation %} in the template"
            if rewrites
            else "the template or the tokenizer renders it differently when the answer follows; mark what the assistant says with "
            "{% generation %} in the template"
        )
        change = f"{self._excerpt(prefix, at)} became {self._excerpt(full, at)}"
        raise DataError(f"{self.where}: {what} must be a prefix on token ids, and is not from token {at} on ({change}); {remedy}")

    def _excerpt(self, ids: Sequence[int], at: int) -> str:
        """Return eight tokens from `at` on, as text if the tokenizer can decode."""
        excerpt = list(ids[at : at + 8])
        decode = getattr(self.tokenizer, "decode", None)
        return repr(decode(excerpt)) if decode is not None else str(excerpt)


def _join_touching(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join adjacent spans. Example: (0, 2), (2, 5), (6, 7) give (0, 5), (6, 7)."""
    result: list[tuple[int, int]] = []
    for start, end in spans:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], end)
        else:
            result.append((start, end))
    return result


def apply_template(tokenizer: Any, messages: Sequence[Message], *, prompt: bool, where: str, **args: Any) -> list[int]:
    """Return the token ids of the rendered messages, with the placeholders of their images. Raises
    DataError, naming the row, if the template raises, and for images that cannot be shown."""
    has_images = bool(find_message_digests(messages))
    marker = require_images(tokenizer, where).marker if has_images else ""
    try:
        rendered = ChatTemplate(tokenizer, marker).apply(messages, prompt=prompt, tokenize=not has_images, **args)
    except Exception as error:  # a template is a program: it may raise anything
        raise _template_error(tokenizer, error, where) from error
    if isinstance(rendered, str):
        return tokenize_text(tokenizer, expand_images(tokenizer, rendered, messages, where))
    return rendered


def require_images(tokenizer: Any, where: str) -> Any:
    """The processor of images. Raises DataError for a model that reads text alone."""
    if (images := find_processor(tokenizer)) is None:
        raise DataError(f"{where} has images, and the model reads text alone; name a vision model, or leave out the images")
    return images


def expand_images(tokenizer: Any, text: str, messages: Sequence[Message], where: str) -> str:
    """The rendered text with the placeholders of its images. Raises DataError, naming the row."""
    processor = require_images(tokenizer, where)
    try:
        check_texts(messages, processor)
        return expand_markers(text, find_message_digests(messages), processor)
    except (ConfigError, DataError) as error:
        raise DataError(f"{where}: {error}") from error


def find_images(tokenizer: Any, ids: Sequence[int], messages: Sequence[Message]) -> tuple[ImageSpan, ...]:
    """Where the images of the conversation are in its ids."""
    digests, images = find_message_digests(messages), find_processor(tokenizer)
    return find_spans(ids, digests, images) if digests and images is not None else ()


def _render_marked(
    tokenizer: Any, messages: Sequence[Message], template_args: Mapping[str, Any], where: str
) -> tuple[str, list[tuple[int, int]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("a template with {% generation %} needs a fast tokenizer")
    arguments = {**tokenizer.special_tokens_map, **template_args}
    try:
        texts, spans = render_jinja_template(
            conversations=[ChatTemplate(tokenizer).show(messages)],
            chat_template=read_template(tokenizer, arguments.get("tools")),
            tools=arguments.pop("tools", None),
            return_assistant_tokens_mask=True,
            **arguments,
        )
    except Exception as error:
        raise _template_error(tokenizer, error, where) from error
    return texts[0], [(int(start), int(end)) for start, end in spans[0]]


def _template_error(tokenizer: Any, error: Exception, where: str) -> DataError | ConfigError:
    if not getattr(tokenizer, "chat_template", True):
        return ConfigError(
            f"{where} is a conversation, but the tokenizer has no chat template; set chat_template=FILE.jinja, or use rows of prompt and "
            "completion; the small model that is made without model= has one with network.end_of_turn=newline"
        )
    return DataError(f"{where}: the chat template refuses this conversation: {type(error).__name__}: {error}")


def tokenize_text(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of the text, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def append_eos(tokenizer: Any, ids: list[int]) -> list[int]:
    """Return `ids` with the end token at the end, appended if it is missing; unchanged if the
    tokenizer has no end token. Example: with end token 2, [5, 6] and [5, 6, 2] both give
    [5, 6, 2]."""
    eos = getattr(tokenizer, "eos_token_id", None)
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def tokenize_document(tokenizer: Any, text: str, max_tokens: int | None, where: str) -> list[ChatTokens]:
    """Return a plain text as samples whose tokens are all trained but the first, which nothing
    precedes. Special tokens that the tokenizer begins a text with, and the end token, belong to it.

    A text of more than `max_tokens` tokens is divided: each further sample begins with the last
    token of the one before it, as context, so that each token is trained once. Raises RowError,
    naming the row `where`, for an empty text.

    Example: ids [5, 6, 7, 8, 2] with `max_tokens` 3 are [5, 6, 7] with mask [0, 1, 1] and
    [7, 8, 2] with mask [0, 1, 1].
    """
    if not text:
        raise RowError(f"{where} has an empty text; leave the row out", reason="empty_response")
    ids = append_eos(tokenizer, list(tokenizer(text, verbose=False)["input_ids"]))
    longest = max(2, len(ids) if max_tokens is None else max_tokens)
    starts = range(0, max(1, len(ids) - 1), longest - 1)
    pieces = [ids[start : start + longest] for start in starts]
    return [ChatTokens(piece, [0] + [1] * (len(piece) - 1)) for piece in pieces]


def tokenize_prompt_completion(tokenizer: Any, prompt: str, completion: str, where: str) -> ChatTokens:
    """Return the ids of prompt, completion and end token; completion and end token are the action.
    The prompt begins with the token with which the tokenizer begins texts, if there is one.

    If the tokenizer merges characters of prompt and completion into one token, the two are
    tokenised separately: the policy reads the prompt by itself. Raises RowError, naming the row
    `where`, for an empty completion.

    Example with end token 2: `2+` is [5, 6] and `2+2` is [5, 6, 5], so the completion is [5]: ids
    [5, 6, 5, 2], mask [0, 0, 1, 1]. If `2+2` were the single token [8], the completion `2` would be
    tokenised by itself.
    """
    prompt_ids, joint_ids = tokenize_text(tokenizer, prompt), tokenize_text(tokenizer, prompt + completion)
    is_prefix = joint_ids[: len(prompt_ids)] == prompt_ids
    completion_ids = joint_ids[len(prompt_ids) :] if is_prefix else tokenize_text(tokenizer, completion)
    if not completion_ids:
        raise RowError(f"{where} has an empty completion; leave the row out", reason="empty_response")
    completion_ids = append_eos(tokenizer, completion_ids)
    prompt_ids = begin_text(tokenizer, prompt_ids)
    return ChatTokens([*prompt_ids, *completion_ids], [0] * len(prompt_ids) + [1] * len(completion_ids))
