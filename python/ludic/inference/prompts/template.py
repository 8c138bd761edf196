"""A tokenizer's chat template: renders messages and tools, and knows the tokens that end a turn.
Whatever shows a conversation to a model renders it here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from ludic.errors import ConfigError, DataError, check_value
from ludic.images.content import find_digests
from ludic.inference.request import ChatCompletionRequest
from ludic.types import Message

_SET = ("messages", "conversation", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "return_dict")
"""Arguments of a rendering that no setting and no row may change."""


def read_template(tokenizer: Any, tools: Any = None) -> str:
    """The Jinja source of the tokenizer's chat template; if there are several, of the one named
    `default`, or with tools of `tool_use`. Empty if there is none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("tool_use" if tools and "tool_use" in template else "default")
    return template or ""


def with_kwargs(template: Any, template_kwargs: Mapping[str, Any]) -> Any:
    """The template with other defaults of its arguments, so that whatever renders it has them.
    Raises ConfigError for an argument that it does not read, or that every rendering sets.

    Example: `{enable_thinking: false}` puts `{%- set enable_thinking = enable_thinking if
    enable_thinking is defined and enable_thinking is not none else False %}` before it."""
    if isinstance(template, Mapping):
        return {name: with_kwargs(each, template_kwargs) for name, each in template.items()}
    for name in template_kwargs:
        if name in _SET or not name.isidentifier() or not re.search(rf"\b{re.escape(name)}\b", template or ""):
            why = "every prompt sets" if name in _SET else "the tokenizer's chat template does not read"
            raise ConfigError(f"chat_template_kwargs has {name}, which {why}; leave it out")
    values = (
        f"{{%- set {name} = {name} if {name} is defined and {name} is not none else {value!r} %}}"
        for name, value in template_kwargs.items()
    )
    defaults = "".join(values) + "{{ '' }}"  # after a block, a line break at the beginning of the template would be dropped
    return template if template.startswith(defaults) else defaults + template


def read_template_kwargs(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The column `chat_template_kwargs` of a row, without nulls: files of columns have them where
    another row has a value. Raises DataError, naming the row, for anything but an object."""
    given = row.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping):
        raise DataError(f'{where}: chat_template_kwargs ({given!r:.80}) must be an object such as {{"enable_thinking": false}}')
    if name := next((name for name in given if name in _SET), None):
        raise DataError(f"{where}: chat_template_kwargs has {name}, which every prompt sets; leave it out")
    return {name: value for name, value in given.items() if value is not None}


def begin_text(tokenizer: Any, ids: list[int]) -> list[int]:
    """The ids of a plain text, after the token with which the tokenizer begins texts, such as
    Gemma's `<bos>`, if it has one and they do not begin with it. A model that was trained with it
    predicts a text without it far worse. Example: with 1, [5, 6] and [1, 5, 6] give [1, 5, 6]."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or ids[:1] == [bos] or list(tokenizer("a")["input_ids"])[:1] != [bos]:
        return ids
    return [bos, *ids]


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """The ids of a plain text (`begin_text`), without other special tokens."""
    return begin_text(tokenizer, list(tokenizer(text, add_special_tokens=False)["input_ids"]))


def begin_prompt(tokenizer: Any, ids: list[int]) -> list[int]:
    """The ids of a rendered prompt. A chat template writes how it begins; else `begin_text`."""
    return ids if read_template(tokenizer) else begin_text(tokenizer, ids)


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Id -> text of the tokens that decoding leaves out."""
    known = dict(zip(getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ()), strict=True))
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return known | {token: each.content for token, each in added.items() if each.special}


class ChatTemplate:
    """Renders prompts with the tokenizer's chat template.

    Without a template, the prompt of a single message is its text, after the system message and a
    blank line if there is one. A longer conversation is an error: nothing would separate the
    messages or name the speakers.
    """

    def __init__(self, tokenizer: Any, marker: str = "") -> None:
        """`marker` stands for an image where there is no template, or one that knows only text."""
        self._tokenizer, self._marker = tokenizer, marker
        self._checked: set[tuple[str, str]] = set()
        """(template, tools) pairs that were checked to render the tools."""

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), **template_kwargs: Any) -> str:
        """The prompt, up to the beginning of the model's answer. Raises ConfigError if it would not
        contain the tools or name the speakers."""
        template = read_template(self._tokenizer)
        if not template:
            if tools:
                raise ConfigError("the tokenizer has no chat template; set tokenizer.chat_template to one that renders tools")
            return _join_contents(self.show(messages))
        text = str(self.apply(messages, prompt=True, tokenize=False, tools=tools, **template_kwargs))
        if tools and (key := (template, json.dumps(tools))) not in self._checked:
            if text == self.apply(messages, prompt=True, tokenize=False, **template_kwargs):
                raise ConfigError("the tokenizer's chat template ignores tools; set tokenizer.chat_template to one with `tools`")
            self._checked.add(key)
        return text

    def apply(
        self, messages: Sequence[Message], *, prompt: bool, tokenize: bool, tools: Any = None, **template_kwargs: Any
    ) -> str | list[int]:
        """The rendered messages as text, or as token ids. With `prompt` the header of the
        assistant's next message follows. Raises what the template raises."""
        arguments = {**template_kwargs, **({"tools": list(tools)} if tools else {})}
        plain = self.show(messages)
        rendered = self._tokenizer.apply_chat_template(plain, add_generation_prompt=prompt, tokenize=tokenize, **arguments)
        if isinstance(rendered, str):
            return rendered
        return list(rendered["input_ids"] if isinstance(rendered, Mapping) or hasattr(rendered, "keys") else rendered)

    def render_all(self, dialogues: Sequence[Sequence[Message]], template_kwargs: Sequence[Mapping[str, Any]] = ()) -> list[str]:
        """`render` each dialogue without tools, with its `template_kwargs` if any has some. One
        call of the tokenizer takes half the time of many."""
        if any(template_kwargs):
            return [self.render(each, **given) for each, given in zip(dialogues, template_kwargs, strict=True)]
        if not read_template(self._tokenizer) or not dialogues:
            return [_join_contents(self.show(messages)) for messages in dialogues]
        plain = [self.show(messages) for messages in dialogues]
        texts: list[str] = self._tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
        return texts

    def show(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template reads them: the parts of a content with images, or their
        text with markers; of other contents the text, or one part of it for templates that would
        leave a text out (LLaVA's)."""
        template = read_template(self._tokenizer)
        if "image" not in template:
            messages = [_join_parts(message, self._marker) for message in messages]
        plain = [normalize_message(message) for message in messages]
        if "image" in template and not _reads_text(self._tokenizer, template):
            return [
                {**message, "content": [{"type": "text", "text": text}]}
                if isinstance(text := message["content"], str)
                else message
                for message in plain
            ]
        return plain


def _join_parts(message: Message, marker: str) -> Message:
    if not find_digests(content := message.get("content")):
        return message
    return {**message, "content": "".join(part.get("text", marker) for part in content or ())}


@lru_cache(maxsize=16)
def _reads_text(tokenizer: Any, template: str) -> bool:
    """Whether the template shows a content that is text. True if it cannot tell."""
    text = "a-text-4711"
    for before in ((), ({"role": "system", "content": "?"},)):
        try:
            messages = [*before, {"role": "user", "content": text}]
            return text in tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception:  # a template is a program: it may raise anything
            continue
    return True


@dataclass(frozen=True)
class TurnEnd:
    """How the assistant's turns end. Example: with ChatML in a model whose end token is
    `<|endoftext|>`, the token is `<|im_end|>`, and `ids` has both."""

    token: int | None
    """The token that ends an answer; None for a tokenizer without an end token."""
    ids: frozenset[int]
    """Tokens at which an answer ends: the template's and the tokenizer's end token."""
    closing: tuple[int, ...] = ()
    """What the template writes after the last answer of a conversation, from the end token on.
    Empty if it writes no end token there."""
    is_open: bool = False
    """The template ends no answer: the special token with which the next message begins does. It
    has to be added to the last answer of a conversation."""

    def find(self, ids: Sequence[int], start: int) -> int:
        """The index after the end token of an answer that begins at `start` and is the last of the
        rendered `ids`; their length if they have none. What the template adds after the end token
        is never sampled. Example: ids [1, 2, 7, 0, 9] with the closing tokens [0, 9] give 4."""
        known = len(ids) - len(self.closing)
        if self.closing and known >= start and tuple(ids[known:]) == self.closing:
            return known + 1
        return next((index + 1 for index in range(len(ids) - 1, start - 1, -1) if ids[index] in self.ids), len(ids))


def find_turn_end(tokenizer: Any) -> TurnEnd:
    """The end of the assistant's turns: the first special or added token after the answer of a
    rendered conversation, or the one with which the next message begins. Without either, the
    tokenizer's end token. Added tokens of white space end nothing."""
    return _find_turn_end(tokenizer, read_template(tokenizer), getattr(tokenizer, "eos_token_id", None))


@lru_cache(maxsize=16)
def _find_turn_end(tokenizer: Any, template: str, eos: int | None) -> TurnEnd:
    own = frozenset([] if eos is None else [eos])
    after = _ids_after_answer(tokenizer, ()) if template else None
    if after is None:
        return TurnEnd(eos, own)
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    added_ids = (token for token, known in added.items() if known.special or known.content.strip(" \t\r\n▁"))
    ending = own.union(getattr(tokenizer, "all_special_ids", ()), added_ids)
    first = next((index for index, token in enumerate(after) if token in ending), None)
    if first is not None:
        return TurnEnd(after[first], own | {after[first]}, tuple(after[first:]))
    begun = [_ids_after_answer(tokenizer, ({"role": role, "content": "?"},)) for role in ("user", "tool")]
    headers = [ids[0] for ids in begun if ids and ids[0] in ending]
    return TurnEnd(headers[0] if headers else eos, own.union(headers), is_open=bool(headers))


def _ids_after_answer(tokenizer: Any, following: Sequence[Message]) -> list[int] | None:
    """The token ids after an answer that `following` follows; None if the template cannot tell. A
    template that fails without a system message gets one."""
    answer = "an-answer-4711"
    messages: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}, *following]
    for before in ((), ({"role": "system", "content": "?"},)):
        try:
            text = str(ChatTemplate(tokenizer).apply([*before, *messages], prompt=False, tokenize=False))
            _, found, after = text.rpartition(answer)
            return list(tokenizer(after, add_special_tokens=False)["input_ids"]) if found else None
        except Exception:  # a template is a program: it may raise anything
            continue
    return None


def _join_contents(messages: Sequence[Message]) -> str:
    """The text of a single message, after the system message and a blank line if there is one."""
    contents = [message.get("content") or "" for message in messages]
    roles = [str(message.get("role")) for message in messages]
    if len(messages) < 2 or (len(messages) == 2 and roles[0] in ("system", "developer")):
        return "\n\n".join(content for content in contents if content)
    raise ConfigError(
        f"the prompt has {len(messages)} messages ({', '.join(roles)}), and the tokenizer has no chat template; set its chat_template"
    )


def normalize_message(message: Message) -> Message:
    """The form that chat templates expect: `content` is present, images in it are
    `{"type": "image"}`, and the arguments of tool calls are objects rather than JSON text."""
    content = message.get("content")
    has_images = bool(find_digests(content))
    if content is not None and not message.get("tool_calls") and not has_images:
        return message
    normalized = {**message, "content": content or ""}
    if has_images:
        normalized["content"] = [{"type": "image"} if part.get("type") == "image" else part for part in content or ()]
    if message.get("tool_calls"):
        normalized["tool_calls"] = [_with_arguments_object(call) for call in message["tool_calls"]]
    return normalized


def _with_arguments_object(call: Any) -> Any:
    try:
        function = call["function"]
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


@dataclass(frozen=True)
class Dialogue:
    """Messages, the tools that the model may call, and arguments of the chat template."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    forced: str | None = None
    """The tool that the model must call; empty for any."""
    keep_malformed: bool = False
    """As of a `ToolRequest`."""

    @classmethod
    def of(cls, request: ChatCompletionRequest, messages: Sequence[Message] | None = None) -> Dialogue:
        """The dialogue of a request, or of other `messages` with its settings. Raises ConfigError
        for a `tool_choice` that is none, or names no tool of the request."""
        shown, given = request.messages if messages is None else messages, request.chat_template_kwargs
        if request.tools is None or request.tools.tool_choice == "none":
            return cls(shown, (), given)
        choice, tools = request.tools.tool_choice, request.tools.tools
        if isinstance(choice, Mapping):
            name = (choice.get("function") or {}).get("name")
            check_value("the function of tool_choice", name, choices=tuple(tool["function"]["name"] for tool in tools))
            return cls(shown, tools, given, name, request.tools.keep_malformed)
        check_value("tool_choice", choice, "or name a function", choices=("auto", "none", "required"), optional=True)
        return cls(shown, tools, given, "" if choice == "required" and tools else None, request.tools.keep_malformed)

    @cached_property
    def key(self) -> str:
        return json.dumps([list(self.messages), list(self.tools), dict(self.template_kwargs)])


def reads_same_ids(reader: Any, writer: Any) -> bool:
    """Whether every token id of `writer` is the same token in `reader`, so that ids can be passed
    from one model to the other without decoding. `reader` may have more tokens, and may split text
    differently."""
    if reader is None or writer is None:
        return False
    return reader is writer or bool(writer.get_vocab().items() <= reader.get_vocab().items())
