"""The text that a chat template writes between a sampled answer and the next one, so that a later
prompt can begin with the sampled tokens, and what a template does to the turns before.

Example, with ChatML: after the tokens of `<|im_start|>assistant\\nParis<|im_end|>`, of which the
model sampled `Paris<|im_end|>`, the user's message `Sure?` adds
`\\n<|im_start|>user\\nSure?<|im_end|>\\n<|im_start|>assistant\\n`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from ludic.errors import ConfigError
from ludic.images.content import find_message_digests
from ludic.inference.prompts.template import ChatTemplate, Dialogue, find_turn_end, read_template, special_tokens
from ludic.inference.prompts.tool_formats import FORMATS, ToolFormat, Tools
from ludic.types import Message

_MARK = f"mark{secrets.token_hex(8)}"
"""Stands for an answer or its reasoning in renderings. No text of a dialogue contains it: it is
random in each process."""
_TAIL_MARK = f"tail{secrets.token_hex(8)}"
_ASKED: Message = {"role": "user", "content": "u"}
THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True)
class Bridge:
    """What follows an answer: the token that ends it, and the text after that token."""

    end: int | None
    """None for a template that writes no such token."""
    text: str


@dataclass(frozen=True)
class _Habits:
    """What a template was seen to do with the dialogues of `_PROBES`."""

    needs_whole: bool
    """It writes another text after an answer if the dialogue before is longer."""
    rewrites: bool
    """It shows earlier turns differently when others follow."""
    drops_thoughts: bool
    """It does not always show the thoughts of earlier answers."""


class TemplateBridge:
    """Finds the text between an answer and the next one by rendering the answer as a mark.

    The mark's place shows where the answer ends, whatever the template does with its text. Only the
    user's "u", the answer and the messages after it are rendered, which takes the time of a short
    dialogue; the whole dialogue is, for a template that would write another text there.
    """

    def __init__(self, tokenizer: Any, template: ChatTemplate | None = None) -> None:
        self._tokenizer, self._template = tokenizer, template or ChatTemplate(tokenizer)
        self._ends: dict[tuple[str, bool, str], int | None] = {}
        """(template, has calls, role of the next message) -> the token that ends the answer."""
        self._habits: dict[str, _Habits] = {}
        self._formats: dict[str, ToolFormat] = {}
        self.text_of = cache(
            lambda token: str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        )
        self._after_short = lru_cache(maxsize=512)(lambda template, key: self._after(Dialogue(*json.loads(key)), 1))
        """Of recent replies: games and tools repeat theirs, and to render one takes long."""

    def after(self, dialogue: Dialogue, answer: int) -> Bridge | None:
        """What follows the answer `dialogue.messages[answer]`, up to where the next answer begins;
        None if the template does not show the answer. Raises what the template raises."""
        messages, given = dialogue.messages, dialogue.template_kwargs
        if not (self.habits.needs_whole or find_message_digests(messages[answer:])):  # a template may number images
            try:
                short = Dialogue([_ASKED, _marked(messages[answer]), *messages[answer + 1 :]], (), given)
                return self._after_short(read_template(self._tokenizer), short.key)
            except Exception:  # a template is a program; perhaps it demands a system message, or the tools
                pass
        return self._after(dialogue, answer)

    def find_kept(self, dialogue: Dialogue, answers: Sequence[int]) -> int | None:
        """The last of the `answers`, places in ascending order, up to which the template shows the
        messages as it did when the answer was sampled, with its reasoning; None if there is none.
        Raises what the template raises.

        A template that drops a thought drops those before it too: after the last answer, the place
        is found by bisection.
        """
        if not answers:
            return None
        habits = self.habits
        if not (habits.rewrites or (habits.drops_thoughts and any(map(_has_reasoning, dialogue.messages)))):
            return answers[-1]
        text = self._render(dialogue)
        if self._keeps(dialogue, answers[-1], text):
            return answers[-1]
        least, most = 0, len(answers) - 1  # answers[: least] are kept
        while least < most:
            middle = (least + most) // 2
            least, most = (middle + 1, most) if self._keeps(dialogue, answers[middle], text) else (least, middle)
        return answers[least - 1] if least else None

    def find_format(self, tools: Tools) -> ToolFormat:
        """The format in which the template writes calls. Raises ConfigError unless it shows the
        tools, a call and its result, and writes the call in a known format."""
        source = read_template(self._tokenizer)
        if source not in self._formats:
            self._formats[source] = self._find_format(tools)
        return self._formats[source]

    def begin_call(self, dialogue: Dialogue) -> str:
        """The text that makes the answer to a dialogue a call of the tool `dialogue.forced`, or of
        any if that is empty: what the template writes before the name or the arguments. It closes
        a thought that the prompt opens. Raises ConfigError if the template writes no such text.

        Example, with Hermes's format: `<tool_call>\\n{"name": "` for any.
        """
        asked, name = replace(dialogue, messages=[_ASKED]), dialogue.forced or _MARK
        prompt = self._render(asked)
        with_call = (replace(asked, messages=[_ASKED, _call(name, given)]) for given in ({}, {"x": "1"}))
        shown = _common(*map(self._render, with_call))
        shown = shown if dialogue.forced else shown[: shown.find(_MARK)]
        begun = None if shown.startswith(prompt) else re.search(self.find_format(dialogue.tools).opening, shown)
        if begun is None and not shown.startswith(prompt):
            raise ConfigError("the chat template writes no text with which a call begins; set tool_choice to auto or none")
        return shown[len(prompt) if begun is None else begun.start() :]

    def _find_format(self, tools: Tools) -> ToolFormat:
        name, argument, result = "look_up", "an-argument-4711", "a-result-8192"
        told: Message = {"role": "tool", "tool_call_id": "call00000", "name": name, "content": result}
        dialogue = Dialogue([_ASKED, _call(name, {"example": argument}), told], tools)
        try:
            text = self._template.render(dialogue.messages, tools)
            prompt, bridge = self._render(replace(dialogue, messages=[_ASKED])), self._after(dialogue, 1)
        except ConfigError:
            raise
        except Exception as error:  # of the template, which may raise anything
            raise ConfigError(f"the chat template cannot write a call of a tool and its result: {error}") from error
        for part, shown in (("calls of tools (`tool_calls`)", argument), ("results of tools (role `tool`)", result)):
            if shown not in text:
                raise ConfigError(f"the chat template leaves out the {part}")
        written = text[len(_common(prompt, text)) : len(text) - len(bridge.text if bridge else "")]
        written = written.removesuffix(self.text_of(bridge.end) if bridge and bridge.end is not None else "")
        for known in FORMATS.values():
            if known.read(written, tools)[1] == [(name, {"example": argument})]:
                return known
        raise ConfigError(
            f"the chat template writes a call as {written[-200:]!r}, which is in none of the formats {', '.join(FORMATS)}"
        )

    @property
    def turn_end(self) -> int | None:
        """The token that ends an answer."""
        return find_turn_end(self._tokenizer).token

    @property
    def habits(self) -> _Habits:
        """What the present template does with the dialogues of `_PROBES`; found out once."""
        source = read_template(self._tokenizer)
        if source not in self._habits:
            thinking = [probe for probe in _PROBES if any(map(_has_reasoning, probe.messages))]
            rewrites = any(self._rewrites(probe) for probe in _PROBES if probe not in thinking)
            self._habits[source] = _Habits(any(map(self._needs_whole, _PROBES)), rewrites, any(map(self._rewrites, thinking)))
        return self._habits[source]

    def _keeps(self, dialogue: Dialogue, answer: int, text: str) -> bool:
        """Whether the `text` of a dialogue begins as when an answer was sampled, and shows its
        reasoning."""
        before = replace(dialogue, messages=dialogue.messages[:answer])
        # What the prompt of these messages and a conversation that ends with them have in common is
        # what they are shown as, without the header of an answer, or a token that ends the text.
        begins = _common(self._render(before), self._render(before, prompt=False))
        return text.startswith(begins) and self._shows_reasoning(dialogue, answer)

    def _render(self, dialogue: Dialogue, *, prompt: bool = True) -> str:
        messages, tools, given = dialogue.messages, dialogue.tools, dialogue.template_kwargs
        return str(self._template.apply(messages, prompt=prompt, tokenize=False, tools=tools, **given))

    def _shows_reasoning(self, dialogue: Dialogue, answer: int) -> bool:
        """Whether the template shows the reasoning of the answer. True if it has none."""
        message = dialogue.messages[answer]
        if not _has_reasoning(message):
            return True
        said = str(message.get("content") or "").partition(THINK_END)[2]
        field = {"reasoning_content": _MARK} if message.get("reasoning_content") else None
        marked = {**message, **(field or {"content": f"{THINK}\n{_MARK}\n{THINK_END}{said}"})}
        return _MARK in self._render(_with_message(dialogue, answer, marked))

    def _after(self, dialogue: Dialogue, answer: int) -> Bridge | None:
        # 1. Render the answer as a mark. 2. Skip what the template writes up to the token that ends
        # the answer. Example: "<|im_start|>assistant\nMARK<|im_end|>\n<|im_start|>user\n...".
        message, tail = dialogue.messages[answer], dialogue.messages[answer + 1 :]
        _, mark, text = self._render(_with_message(dialogue, answer, _marked(message))).rpartition(_MARK)
        if not mark:
            return None
        end = self._end_of(bool(message.get("tool_calls")), str(tail[0].get("role")) if tail else "")
        if end is not None and (place := text.find(self.text_of(end))) >= 0:
            return Bridge(end, text[place + len(self.text_of(end)) :])
        if not message.get("tool_calls"):
            return Bridge(None, text)
        # Without an end token, a call ends where what follows an answer without calls begins.
        plain = {"role": "assistant", "content": _MARK}
        _, _, following = self._render(_with_message(dialogue, answer, plain)).rpartition(_MARK)
        return Bridge(None, following) if text.endswith(following) else None

    def _end_of(self, has_calls: bool, role: str) -> int | None:
        """The token that ends an answer before a message of this role: the first that is known to
        end answers, else the first special one that is not in the answer as well, such as Gemma's
        quotes."""
        key = (read_template(self._tokenizer), has_calls, role)
        if key not in self._ends:
            answer, between = self._example(has_calls, role)
            special = [token for token, text in special_tokens(self._tokenizer).items() if text not in answer]
            for ids in (find_turn_end(self._tokenizer).ids, special):
                found = [(place, token) for token in ids if (place := between.find(self.text_of(token))) >= 0]
                self._ends[key] = min(found)[1] if found else None
                if found:
                    break
        return self._ends[key]

    def _example(self, has_calls: bool, role: str) -> tuple[str, str]:
        """(an answer up to its last text, what follows it up to the content of a message)."""
        answer: Message = _call("f", {}) if has_calls else {"role": "assistant", "content": ""}
        result = {"tool_call_id": "call00000", "name": "f"} if role == "tool" else {}
        tail: list[Message] = [{"role": role, "content": _TAIL_MARK, **result}] if role else []
        for before in ([_ASKED], [{"role": "system", "content": "s"}, _ASKED]):
            try:
                prompt = self._render(Dialogue(before))
                text = self._render(Dialogue([*before, _marked(answer), *tail]))
                shown, _, after = text.rpartition(_MARK)
                return shown[len(_common(prompt, shown)) :], after.partition(_TAIL_MARK)[0]
            except Exception:  # a template is a program: it may raise anything
                continue
        token = find_turn_end(self._tokenizer).token
        return "", "" if token is None else self.text_of(token)

    def _needs_whole(self, dialogue: Dialogue) -> bool:
        messages = dialogue.messages
        for answer, message in enumerate(messages[:-1]):
            if message["role"] == "assistant":
                try:
                    short = Dialogue([_ASKED, *messages[answer:]])
                    if self._after(short, 1) != self._after(dialogue, answer):
                        return True
                except Exception:  # of the template; `after` meets it again
                    continue
        return False

    def _rewrites(self, dialogue: Dialogue) -> bool:
        answers = [place for place, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
        ends = [*answers, len(dialogue.messages)]
        try:
            shorter = {end: replace(dialogue, messages=dialogue.messages[:end]) for end in ends}
            texts = {end: self._render(each) for end, each in shorter.items()}
            return not all(self._keeps(shorter[end], place, texts[end]) for place in answers for end in ends if end > place)
        except Exception:  # of the template, for example because it has no tools or no system message
            return False


def _with_message(dialogue: Dialogue, place: int, message: Message) -> Dialogue:
    return replace(dialogue, messages=[*dialogue.messages[:place], message, *dialogue.messages[place + 1 :]])


def _common(first: str, second: str) -> str:
    """The text with which both begin, by bisection: comparing slices takes no time."""
    least, most = 0, min(len(first), len(second))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if first[:middle] == second[:middle] else (least, middle - 1)
    return first[:least]


def _call(name: str, arguments: dict[str, Any]) -> Message:
    call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _has_reasoning(message: Message) -> bool:
    """Whether an answer has reasoning, in its `reasoning_content` or before `</think>`."""
    if message.get("role") != "assistant":
        return False
    thought, closed, _ = str(message.get("content") or "").partition(THINK_END)
    return bool(message.get("reasoning_content") or (closed and thought.replace(THINK, "").strip()))


def _marked(answer: Message) -> Message:
    """The answer whose last text is the mark: of its last call's argument, else of its content."""
    calls = list(answer.get("tool_calls") or ())
    if not calls:
        return {"role": "assistant", "content": _MARK}
    last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {"x": _MARK}}}
    return {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], last]}


def _make_probes() -> list[Dialogue]:
    """Dialogues with a system message, calls of tools, and thoughts as content and as a field."""
    system: Message = {"role": "system", "content": "s"}
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}]

    def user(text: str) -> Message:
        return {"role": "user", "content": text}

    def answer(text: str, call: int | None = None, **more: Any) -> Message:
        made = {"id": f"call0000{call}", "type": "function", "function": {"name": "f", "arguments": {"x": str(call)}}}
        return {"role": "assistant", "content": text, **({} if call is None else {"tool_calls": [made]}), **more}

    def result(call: int) -> Message:
        return {"role": "tool", "tool_call_id": f"call0000{call}", "name": "f", "content": f"r{call}"}

    talk = [user("q1"), answer("a1"), user("q2"), answer("a2"), user("q3")]
    probes = [Dialogue(talk), Dialogue([system, *talk])]
    for thought, field in (("", None), (f"{THINK}\nt\n{THINK_END}\n\n", None), ("", "t")):
        more: dict[str, Any] = {} if field is None else {"reasoning_content": field}
        said = [answer(thought, 0, **more), answer(thought, 1, **more), answer(thought + "a", **more)]
        if thought or field:
            probes.append(Dialogue([user("q1"), said[2], user("q2"), said[2], user("q3")]))
        called = [user("q1"), said[0], result(0), said[1], result(1), said[2], user("q2")]
        probes += [Dialogue(called, tools), Dialogue([system, *called], tools)]
    return probes


_PROBES = _make_probes()
