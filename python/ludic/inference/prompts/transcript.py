"""The answers that were sampled in one episode, and the prompts that continue them: the ids of a
later prompt are the ids of an earlier prompt, the sampled ids, and the ids of what the template
writes between. A sampled answer is never tokenised again.

Example: prompt `[5, 6]` and answer `[7, 8, 2]` (2 ends a turn) make the next prompt
`[5, 6, 7, 8, 2, ...]`, even if the tokenizer would encode the answer's text as `[9, 2]`.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ludic.columns import Column, append_ids, int_column
from ludic.images.content import find_message_digests
from ludic.inference.prompts.bridge import Bridge, TemplateBridge
from ludic.inference.prompts.template import Dialogue
from ludic.types import ImageSpan, Message, TokenTrace, stored


@dataclass(eq=False)
class Turn:
    """One sampled answer and the prompt that it answers."""

    number: int
    """In the order of arrival, from 0."""
    ids: Column
    """[P + C] int32: its prompt and its answer, in the memory of the turn that it continues."""
    ended: bool
    """Whether the last sampled id ends a turn."""
    answer: Message
    """The answer as the client got it."""
    text: str
    """All sampled text, without the end token."""
    key: bytes
    """Of all messages of its prompt (`message_keys`)."""
    answer_key: bytes
    """Of these and the answer."""
    num_messages: int
    """Of its prompt."""
    images: tuple[ImageSpan, ...] = ()
    """Of its prompt."""

    def hold(self, trace: TokenTrace) -> TokenTrace:
        """The trace of this turn in its memory."""
        at, logps = len(self.ids) - len(stored(trace, "completion_token_ids")), stored(trace, "completion_logprobs")
        prompt, completion = self.ids[:at], self.ids[at:]
        facts = (trace.finish_reason, trace.candidates, self.images, trace.routes)
        return TokenTrace(prompt, completion, logps, *facts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Text:
    """Text to encode, after a token that was sampled or is known."""

    text: str
    after: int | None = None
    images: Sequence[str] = ()
    """The digests of the images that it shows, in order."""


@dataclass
class Prompt:
    """A prompt: the ids that are known from an earlier turn, and the texts to encode."""

    dialogue: Dialogue
    """With the reasoning of earlier answers that the client left out."""
    keys: Sequence[bytes]
    """[M + 1] of the messages as the client sent them."""
    reason: str
    """`continues`: it begins with the parent's prompt and answer. `extended`: the same, and the
    answer came back with text added. Else why it continues no earlier turn: `root` (there is none),
    `tools` (other tools or arguments of the template), `template` (the template rewrites the turns
    before), or `changed:I:FIELD` with the first message that is not as it was."""
    parent: Turn | None = None
    shared: int = 0
    """Leading ids that are the parent's."""
    parts: Sequence[Sequence[int] | Text] = ()
    """Ids, and texts to encode."""
    ids: list[int] = field(default_factory=list)
    """[P] all ids, once they are encoded."""
    images: tuple[ImageSpan, ...] = ()
    """The images in the ids, in order."""
    begun: str = ""
    """Text at the end of the prompt that begins the answer."""


class Transcript:
    """The answers of one episode, found again by the messages of a later prompt.

    A prompt continues an earlier turn if the messages before an assistant message are exactly those
    of that turn, and the assistant message means what was sampled: the same text, white space at
    its ends aside, and the same calls, compared as JSON; ids of calls do not count, and reasoning
    may be missing. Or its text begins with all that was sampled. The last such message is taken,
    and of several answers the latest. Any other prompt is rendered and encoded as a whole.

    A template that drops thoughts of earlier turns shows the model another history than the one it
    sampled. Such a history is followed, as servers show it: only turns up to the change are
    continued. With `keeps_sampled` every answer stays as it was sampled.

    Not thread-safe.
    """

    def __init__(self, bridge: TemplateBridge, *, max_turns: int | None = None, keeps_sampled: bool = False) -> None:
        self.turns: OrderedDict[int, Turn] = OrderedDict()
        """Number -> turn; the last `max_turns`."""
        self._bridge, self._max_turns, self._keeps_sampled = bridge, max_turns, keeps_sampled
        self._by_prompt: dict[bytes, list[Turn]] = {}
        """The key of all messages of a prompt -> its turns."""
        self._count = 0
        self._last_keys: Sequence[bytes] = ()
        """Of the latest turn."""

    def prepare(self, dialogue: Dialogue, begun: Message | None = None) -> Prompt:
        """The prompt of a dialogue, and of an answer to it that is `begun`. Raises what the
        template raises."""
        messages, keys = list(dialogue.messages), message_keys(dialogue)
        answers = [place for place in range(1, len(messages)) if messages[place].get("role") == "assistant"]
        found = {place: known for place in reversed(answers) if (known := self._find(keys, place, messages[place]))}
        for place, (turn, _) in found.items():
            if (thought := turn.answer.get("reasoning_content")) and not messages[place].get("reasoning_content"):
                messages[place] = {**messages[place], "reasoning_content": thought}
        shown = replace(dialogue, messages=messages)
        if begun is not None and (known := self._find([*keys, _next_key(keys[-1], begun)], len(messages), begun)):
            turn, added = known
            ids = turn.ids[:-1].tolist() if turn.ended else turn.ids.tolist()
            return Prompt(
                shown, keys, "continues", turn, len(ids), [ids, Text(added, self._bridge.turn_end)], begun=turn.text + added
            )
        places = sorted(found)
        last = places[-1] if places else None
        kept = last if self._keeps_sampled else self._bridge.find_kept(shown, places)
        bridge = None if kept is None else self._bridge.after(shown, kept)
        if kept is not None and bridge is not None:
            turn, added = found[kept]
            parts = self._continue(turn, added, bridge, find_message_digests(messages[kept + 1 :]))
            return Prompt(shown, keys, "extended" if added else "continues", turn, len(parts[0]), parts)
        return Prompt(shown, keys, "template" if found else self._explain(keys, messages))

    def add(self, prompt: Prompt, completion_ids: Sequence[int], *, ended: bool, answer: Message, text: str) -> Turn:
        """Remember the answer to a prompt. `ended`: its last id ends a turn. `text`: all that was
        sampled, without the end token."""
        shared = int_column([]) if prompt.parent is None else prompt.parent.ids
        shared = shared if prompt.shared == len(shared) else int_column(shared[: prompt.shared])
        ids = append_ids(shared, [*prompt.ids[prompt.shared :], *completion_ids])
        key, num_messages = prompt.keys[-1], len(prompt.keys) - 1
        turn = Turn(self._count, ids, ended, answer, text, key, _next_key(key, answer), num_messages, prompt.images)
        self._last_keys = prompt.keys
        self._count += 1
        self.turns[turn.number] = turn
        self._by_prompt.setdefault(turn.key, []).append(turn)
        while self._max_turns is not None and len(self.turns) > self._max_turns:
            _, oldest = self.turns.popitem(last=False)
            same = self._by_prompt[oldest.key]
            same.remove(oldest)
            if not same:
                del self._by_prompt[oldest.key]
        return turn

    def _continue(self, turn: Turn, added: str, bridge: Bridge, images: Sequence[str]) -> tuple[list[int], Text, list[int], Text]:
        """The turn's ids, what the client added to the answer, the token that ends it, and what
        follows, with its `images`.

        Example: an answer `[7, 2]` that the template ends with 2 keeps both ids. Ended with 3, or
        with text added, it keeps `[7]`, and the template's end token follows. Without an end token,
        because it was cut off, it keeps `[7]` as well.
        """
        ids: list[int] = turn.ids.tolist()
        if turn.ended and (added or ids[-1] != bridge.end):
            ids.pop()
        end = [] if bridge.end is None or (not added and ids[-1:] == [bridge.end]) else [bridge.end]
        return ids, Text(added, bridge.end), end, Text(bridge.text, bridge.end, images)

    def _find(self, keys: Sequence[bytes], place: int, message: Message) -> tuple[Turn, str] | None:
        """The latest turn whose prompt is the messages before this place and whose answer is the
        one there, and the text that was added to it."""
        known, thought = self._by_prompt.get(keys[place], ()), str(message.get("reasoning_content") or "").strip()
        turns = [turn for turn in known if thought in ("", str(turn.answer.get("reasoning_content") or "").strip())]
        for turn in reversed(turns):
            if turn.answer_key == keys[place + 1]:
                return turn, ""
        said = _content_text(message)
        for turn in reversed(turns) if not message.get("tool_calls") else ():
            for begun in (turn.text, turn.text.rstrip()):
                if begun.strip() and said.startswith(begun) and not turn.answer.get("tool_calls"):
                    return turn, said[len(begun) :]
        return None

    def _explain(self, keys: Sequence[bytes], messages: Sequence[Message]) -> str:
        last = next(reversed(self.turns.values()), None)
        if last is None or not any(message.get("role") == "assistant" for message in messages):
            return "root"
        last_keys = self._last_keys
        pairs = zip(keys, last_keys, strict=False)
        same = next((place for place, (now, was) in enumerate(pairs) if now != was), min(len(keys), len(last_keys)))
        if same == 0:
            return "tools"
        place, what = min(same, len(keys) - 1) - 1, "content"
        if same == len(last_keys):
            now, was = canonical_message(messages[place]), canonical_message(last.answer)
            what = "content" if now[:2] != was[:2] else "tool_calls" if now[2] != was[2] else "reasoning"
        return f"changed:{place}:{what}"


def canonical_message(message: Message) -> tuple[Any, ...]:
    """What makes two messages the same: (role, text, calls as (name, JSON of the arguments), name).
    Ids, reasoning and other fields do not count; of an answer neither does white space at the ends
    of its text."""
    role = "system" if message.get("role") == "developer" else message.get("role")
    calls = tuple(map(_canonical_call, message.get("tool_calls") or ()))
    text = _content_text(message)
    return role, text.strip() if role == "assistant" else text, calls, message.get("name") if role == "tool" else None


def message_keys(dialogue: Dialogue) -> list[bytes]:
    """[M + 1] hashes: of the tools and the template's arguments, and of them and the first i
    messages."""
    keys = [_hash(b"", [list(dialogue.tools), dict(dialogue.template_kwargs)])]
    for message in dialogue.messages:
        keys.append(_next_key(keys[-1], message))
    return keys


def _next_key(key: bytes, message: Message) -> bytes:
    return _hash(key, canonical_message(message))


def _content_text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, sort_keys=True)


def _canonical_call(call: Any) -> tuple[Any, Any]:
    try:
        name, arguments = call["function"]["name"], call["function"].get("arguments")
        parsed = msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
        return name, msgspec.json.encode(parsed, order="sorted").decode()
    except (KeyError, TypeError, ValueError, RecursionError, AttributeError):
        return "", repr(call)


def _hash(before: bytes, item: Any) -> bytes:
    try:
        text = msgspec.json.encode(item)
    except (UnicodeEncodeError, TypeError):  # half of a surrogate pair, or an object of the user's
        text = repr(item).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(before + text, digest_size=16).digest()
