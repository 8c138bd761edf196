"""Prompts as token ids, for the clients that render chats themselves."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ludic.errors import ConfigError, DataError
from ludic.images.content import find_message_digests
from ludic.inference.client import Episode, Sampled
from ludic.inference.prompts.bridge import THINK, THINK_END, TemplateBridge
from ludic.inference.prompts.images import check_texts, expand_markers, find_spans, intern_given
from ludic.inference.prompts.template import ChatTemplate, Dialogue, begin_prompt, find_turn_end, read_template, special_tokens
from ludic.inference.prompts.tool_formats import ToolFormat, Tools, completion_finish_reason, count_tool_calls
from ludic.inference.prompts.transcript import Prompt, Text, Transcript, Turn
from ludic.types import ImageSpan, Message, TokenTrace, read_list, stored

if TYPE_CHECKING:
    from ludic.models.images.processor import ImageProcessor

CACHE_SIZE = 4096
"""Dialogues in a cache, whose prompts the samples of a group share; and turns that are remembered
for requests outside of episodes."""


class _Known(NamedTuple):
    ids: array[int]
    images: tuple[ImageSpan, ...]


class DialogueCache:
    """The ids of each of the last `CACHE_SIZE` dialogues, and where its images are. Thread-safe."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, dialogue: Dialogue) -> _Known | None:
        key = dialogue.key
        with self._lock:
            return self._values.get(key)

    def put(self, dialogue: Dialogue, value: _Known) -> None:
        """Store a value; drops the oldest values beyond `CACHE_SIZE`."""
        key = dialogue.key
        with self._lock:
            self._values[key] = value
            while len(self._values) > CACHE_SIZE:
                self._values.popitem(last=False)


@dataclass(frozen=True)
class Answer:
    """An answer as text, as OpenAI's message, and as tokens."""

    text: str
    """Up to the first stop string."""
    message: Message
    trace: TokenTrace
    whole: str
    """All that was sampled, without the end token."""
    stop: str | None
    """The stop string that ended it."""
    ended: bool
    """Whether its last id ends a turn."""


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str | None, str]:
    """(the first stop string, the text before it); (None, the text) if there is none."""
    found = [(position, stop) for stop in stops if (position := text.find(stop)) >= 0]
    return (min(found)[1], text[: min(found)[0]]) if found else (None, text)


def split_reasoning(text: str, *, opened: bool) -> tuple[str | None, str]:
    """(thought, the rest) of an answer; (None, the text) of one without thoughts.
    `opened`: the prompt has opened the thought.

    >>> split_reasoning("<think>\\nhm\\n</think>\\n\\nyes", opened=False)
    ('hm', 'yes')
    """
    thought, closed, said = text.partition(THINK_END)
    if closed:
        return thought.strip().removeprefix(THINK).strip("\n"), said.lstrip("\n")
    if opened or text.lstrip().startswith(THINK):
        return text.lstrip().removeprefix(THINK).strip("\n"), ""
    return None, text


class PromptEncoder:
    """Renders prompts with the tokenizer's chat template, and encodes them. A prompt that continues
    an answer of the same episode begins with the tokens that were read and sampled (`Transcript`).

    Without a template, prompts begin as the tokenizer begins texts; no other special token is
    added. Images of messages become their placeholders, at the places `Prompt.images`. Thread-safe.
    """

    def __init__(
        self, tokenizer: Any, images: ImageProcessor | None = None, *, keeps_sampled: bool = False, model_name: str = "the model"
    ) -> None:
        """`images`: of a model that sees them. `keeps_sampled`: as of a `Transcript`. `model_name`:
        for errors."""
        self.tokenizer, self.images, self._keeps_sampled, self._model_name = tokenizer, images, keeps_sampled, model_name
        self._template = ChatTemplate(tokenizer, "" if images is None else images.marker)
        self._bridge = TemplateBridge(tokenizer, self._template)
        self._whole = DialogueCache()
        """The ids of dialogues that continue nothing."""
        self._lock = threading.Lock()
        self._outside = Transcript(self._bridge, max_turns=CACHE_SIZE, keeps_sampled=keeps_sampled)
        """Of requests outside of episodes."""
        self._transcripts: dict[Episode, Transcript] = {}

    @property
    def extra_end_ids(self) -> list[int]:
        """Tokens that end an answer in addition to the tokenizer's end token, which servers
        know."""
        return sorted(find_turn_end(self.tokenizer).ids - {getattr(self.tokenizer, "eos_token_id", None)})

    def encode(self, dialogue: Dialogue, episode: Episode | None = None, *, begun: Message | None = None) -> Prompt:
        """The prompt of a dialogue, and of an answer to it that is `begun`. Raises ConfigError if
        the template cannot render the tools, and for images that the model or the template cannot
        show; DataError for a text that spells a token of images."""
        [prompt] = self._encode([self._prepare(dialogue, episode, begun)])
        if isinstance(prompt, Exception):
            raise prompt
        return prompt

    def encode_batch(self, dialogues: Sequence[tuple[Dialogue, Episode | None]]) -> list[Prompt | Exception]:
        """Each prompt, or the error that rendering it raised. Calls the tokenizer once."""
        prompts: list[Prompt | Exception] = []
        for dialogue, episode in dialogues:
            try:
                prompts.append(self._prepare(dialogue, episode))
            except Exception as error:
                prompts.append(error)
        return self._encode(prompts)

    def _encode(self, prompts: Sequence[Prompt | Exception]) -> list[Prompt | Exception]:
        """Fill in the ids. A prompt whose ids do not fit its images becomes an error."""
        prepared = [prompt for prompt in prompts if isinstance(prompt, Prompt)]
        parts = [part for prompt in prepared for part in prompt.parts if isinstance(part, Text) and part.text]
        texts = list(dict.fromkeys(map(self._source, parts)))
        encoded = dict(zip(texts, self._tokenize(texts), strict=True)) if texts else {}
        results = list(prompts)
        for place, prompt in enumerate(prompts):
            try:
                if isinstance(prompt, Prompt):
                    self._fill(prompt, encoded)
            except (ConfigError, DataError) as error:
                results[place] = error
        return results

    def _fill(self, prompt: Prompt, encoded: Mapping[str, list[int]]) -> None:
        for number, part in enumerate(prompt.parts):
            ids = self._ids_of(part, encoded) if isinstance(part, Text) else part
            is_whole = prompt.parent is None and number == 0 and isinstance(part, Text)
            ids = begin_prompt(self.tokenizer, list(ids)) if is_whole else ids
            if self.images is not None and isinstance(part, Text):
                prompt.images += find_spans(ids, part.images, self.images, start=len(prompt.ids))
                self.images.check_count(len(prompt.images))
            if is_whole:
                self._whole.put(prompt.dialogue, _Known(array("i", ids), prompt.images))
            prompt.ids += ids

    def read_answer(
        self,
        prompt: Prompt,
        sampled: Sampled,
        *,
        stops: Sequence[str] = (),
        episode: Episode | None = None,
        splits_reasoning: bool = False,
        remembers: bool = True,
    ) -> Answer:
        """The answer to a prompt as text and as a message, with its calls of tools if the prompt
        offers tools. It is cut at the first of the texts `stops`, and remembered for the later
        turns of its episode, unless the caller will do it (`remember`). `splits_reasoning`:
        thoughts are in `reasoning_content`, and not in `content`."""
        dialogue, trace = prompt.dialogue, sampled.trace
        completion_ids = read_list(trace, "completion_token_ids")
        said = completion_ids[:-1] if sampled.ended else completion_ids
        whole = prompt.begun + self.decode(said)
        stop, text = cut_at_stop(whole, stops)
        opened = self.decode(prompt.ids[-8:], special=True).rstrip().endswith(THINK) if splits_reasoning else False
        thought, said_text = split_reasoning(text, opened=opened) if splits_reasoning else (None, text)
        message: Message = {"role": "assistant", "content": said_text}
        if dialogue.tools:
            tool_format, written = self.tool_format(dialogue.tools), said_text
            if any(token in tool_format.tokens for token in special_tokens(self.tokenizer).values()):
                written = cut_at_stop(prompt.begun + self.decode(said, special=True), stops)[1]
                written = split_reasoning(written, opened=opened)[1] if splits_reasoning else written
            first_id, keeps = count_tool_calls(dialogue.messages), dialogue.keep_malformed and trace.finish_reason != "length"
            called = tool_format.message(written, dialogue.tools, first_id=first_id, keep_malformed=keeps)
            message = called if "tool_calls" in called else message
        if thought:
            message["reasoning_content"] = thought
        reason = completion_finish_reason(str(trace.finish_reason), message)
        prompt_ids, ids, logps = (
            stored(trace, name) for name in ("prompt_token_ids", "completion_token_ids", "completion_logprobs")
        )
        kept = TokenTrace(prompt_ids, ids, logps, reason, trace.candidates, prompt.images, trace.routes)
        answer = Answer(text, message, kept, whole, stop, sampled.ended)
        turn = self.remember(prompt, answer, episode) if remembers else None
        return answer if turn is None else replace(answer, trace=turn.hold(kept))

    def remember(self, prompt: Prompt, answer: Answer, episode: Episode | None = None) -> Turn | None:
        """Remember an answer for the later turns of its episode. None for a prompt that is not of a
        chat template."""
        if not prompt.keys:
            return None
        ids = read_list(answer.trace, "completion_token_ids")
        with self._lock:
            transcript = self._transcript(episode)
            return transcript.add(prompt, ids, ended=answer.ended, answer=answer.message, text=answer.whole)

    def tool_format(self, tools: Tools) -> ToolFormat:
        """How the template writes calls. Raises ConfigError if it does not, or writes them in none
        of the known formats."""
        if not read_template(self.tokenizer):
            raise ConfigError("the tokenizer has no chat template; set tokenizer.chat_template to one that renders tools")
        return self._bridge.find_format(tools)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of an answer, without special tokens unless `special`."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def _prepare(self, dialogue: Dialogue, episode: Episode | None, begun: Message | None = None) -> Prompt:
        if (given := intern_given(dialogue.messages, self.images, self._model_name)) is not dialogue.messages:
            dialogue = replace(dialogue, messages=given)
        if read_template(self.tokenizer):
            with self._lock:
                prompt = self._transcript(episode).prepare(dialogue, begun)
        else:
            prompt = Prompt(dialogue, (), "root")
        messages = prompt.dialogue.messages
        if prompt.parent is not None:
            prompt.images, messages = prompt.parent.images, messages[prompt.parent.num_messages + 1 :]
        elif known := self._whole.get(prompt.dialogue):
            prompt.parts, prompt.images, messages = [known.ids], known.images, ()
        else:
            shown = prompt.dialogue
            text = self._template.render(shown.messages, shown.tools, **shown.template_kwargs)
            prompt.parts = [Text(text, images=find_message_digests(messages))]
        appended = ""
        if begun is not None and not prompt.begun:
            appended = str(begun.get("content") or "")
        elif dialogue.forced is not None:
            appended = self._bridge.begin_call(dialogue)
        if appended:
            prompt.begun, prompt.parts = appended, [*prompt.parts, Text(appended, self._bridge.turn_end)]
        if (images := self.images) is not None:
            check_texts(messages, images)
            prompt.parts = [
                replace(part, text=expand_markers(part.text, part.images, images)) if isinstance(part, Text) else part
                for part in prompt.parts
            ]
        return prompt

    def _source(self, part: Text) -> str:
        """The text to encode, after the text of the token before it: tokenizers with pieces put a
        space before a text that stands alone, and some drop what follows a special token."""
        return part.text if part.after is None else self._bridge.text_of(part.after) + part.text

    def _ids_of(self, part: Text, encoded: Mapping[str, list[int]]) -> list[int]:
        ids = encoded[self._source(part)] if part.text else []
        if not part.text or part.after is None or ids[:1] == [part.after]:
            return ids if part.after is None else ids[1:]
        return list(self._tokenize(part.text))  # the token's text is not read as the token

    def _tokenize(self, texts: str | list[str]) -> Any:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def _transcript(self, episode: Episode | None) -> Transcript:
        if episode is None or episode.is_over:
            return self._outside
        if episode not in self._transcripts:
            self._transcripts[episode] = Transcript(self._bridge, keeps_sampled=self._keeps_sampled)
            episode.on_end(lambda over: self._transcripts.pop(over, None))
        return self._transcripts[episode]
