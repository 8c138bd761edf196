"""A small tool environment: a key-value store that is queried one line at a time. The task needs
two calls, and the second depends on the result of the first."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from ludic.envs.env import SingleAgentEnv, check_step
from ludic.errors import check_value
from ludic.types import Info, StepOutcome

KEYS = "abcdefghij"


@dataclass(frozen=True)
class TerseText:
    """One or two characters a turn: question `c`, call `?c`, result `h`, answer `=f`, malformed
    `!`."""

    malformed: str = "!"
    """The reply to a line that is neither a call nor an answer."""

    def question(self, start: str) -> str:
        """The first observation."""
        return start

    def result(self, key: str, content: str) -> str:
        """The result of a call."""
        return content

    def read(self, line: str) -> tuple[str, str] | None:
        """`("call", key)`, `("answer", key)`, or None."""
        kind = {"?": "call", "=": "answer"}.get(line[:1])
        return (kind, line[1]) if kind and len(line) == 2 and line[1] in KEYS else None


@dataclass(frozen=True)
class TaggedText:
    """Sentences with `<get>c</get>` and `<answer>f</answer>`, for chat models."""

    malformed: str = "That is neither <get>KEY</get> nor <answer>KEY</answer>."

    def question(self, start: str) -> str:
        return f"Start at the key {start}. Look up what it holds, look up what that key holds, and answer with the result."

    def result(self, key: str, content: str) -> str:
        return f"{key} holds {content}."

    def read(self, line: str) -> tuple[str, str] | None:
        for tag, kind in (("get", "call"), ("answer", "answer")):
            _, opened, rest = line.partition(f"<{tag}>")
            inside, closed, _ = rest.partition(f"</{tag}>")
            if opened and closed and inside.strip() in set(KEYS):
                return kind, inside.strip()
        return None


StoreText = TerseText | TaggedText
"""The text format of the task, the calls and the results."""
TOOL_RULES = (
    "A store holds one key under each of the keys a to j. To look a key up, write <get>KEY</get> and wait for the result. To answer, "
    "write <answer>KEY</answer>. One of the two a turn."
)


class KeyValueEnv(SingleAgentEnv):
    """`start` holds a key; what does that key hold? The store is hidden; `reset` draws a new one,
    determined by the seed.

    The agent looks up one key a turn and ends the episode with an answer: `right_reward` for the
    right one, else 0. A guess is allowed and is right one time in ten. An episode without an answer
    after `max_turns` is truncated.

    A step's info: `call` (the key that was looked up, or None), `malformed`, and at the end
    `correct`, `target`, and `looked_up`: whether both keys were looked up before the answer.

    >>> env = KeyValueEnv("c", holds="h")
    >>> env.env_reset(seed=0)
    ('c', {})
    >>> env.env_step("?c").obs
    'h'
    """

    def __init__(
        self,
        start: str,
        *,
        holds: str | None = None,
        max_turns: int = 4,
        right_reward: float = 1.0,
        text: StoreText | None = None,
        system_prompt: str | None = None,
    ) -> None:
        super().__init__()
        check_value("start", start, choices=list(KEYS))
        check_value("holds", holds, choices=list(KEYS), optional=True)
        check_value("max_turns", max_turns, least=1)
        self.start, self.holds, self.max_turns = start, holds, max_turns
        self.store: dict[str, str] = {}
        self._right_reward, self._system_prompt = right_reward, system_prompt
        self._text = text or TerseText()
        self._called: list[str] = []
        self._turns, self._done, self._obs = 0, True, ""

    @property
    def target(self) -> str:
        """The right answer of this episode."""
        return self.store[self.store[self.start]]

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        """A new store: `start` holds `holds` if that is set; every other key holds a random one."""
        rng = Random(seed)
        self.store = dict(zip(KEYS, rng.choices(KEYS, k=len(KEYS)), strict=True))
        if self.holds is not None:
            self.store[self.start] = self.holds
        self._called, self._turns, self._done = [], 0, False
        self._obs = self._text.question(self.start)
        return self._obs, {}

    def env_step(self, action: str) -> StepOutcome:
        """Raises RolloutError before the start and after the end of the episode."""
        check_step(not self._done, f"the episode that starts at {self.start} is over")
        self._turns += 1
        kind, key = self._text.read(action) or ("malformed", "")
        if kind == "answer":
            return self._finish(key)
        if kind == "call":
            self._called.append(key)
            self._obs = self._text.result(key, self.store[key])
        else:
            self._obs = self._text.malformed
        self._done = truncated = self._turns >= self.max_turns
        info: Info = {"call": key or None, "malformed": kind == "malformed"}
        if truncated:
            info |= self._verdict(correct=False)
        return StepOutcome(self._obs, 0.0, truncated=truncated, terminated=False, info=info)

    def env_current_obs(self) -> str:
        return self._obs

    def _finish(self, answer: str) -> StepOutcome:
        self._done, correct = True, answer == self.target
        self._obs = "Right." if correct else f"Wrong, it was {self.target}."
        info: Info = {"call": None, "malformed": False, **self._verdict(correct=correct)}
        return StepOutcome(self._obs, self._right_reward * correct, truncated=False, terminated=True, info=info)

    def _verdict(self, *, correct: bool) -> Info:
        looked_up = self.start in self._called and self.store[self.start] in self._called
        return {"correct": correct, "target": self.target, "looked_up": looked_up}
