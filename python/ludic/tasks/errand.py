"""A task for agents: find the content of a key. The agent is a loop around a client of the `openai`
package, and offers a tool that looks a key up.

The imperfect teacher looks a key up in a third of its answers, and guesses in the others. The
content of the keys is one of 16 letters, random in every episode, so that only looking it up is
better than guessing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from ludic.envs.dataset_qa_env import DatasetQAEnv
from ludic.errors import check_value
from ludic.inference.gateway.session import Session
from ludic.tasks.episodic import Episode, EpisodicTask, Played, Shown, share, transcript
from ludic.types import Rollout

KEYS, CONTENTS = "abcdefgh", "abcdefghijklmnop"
_EPISODES = 150
MAX_TURNS = 4
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "What is stored under a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


@dataclass(frozen=True)
class Errand(EpisodicTask):
    """Eight keys with random content; reward 1 for the content of the key that is asked for."""

    looks: float = 1 / 3
    """Share of the teacher's answers that look the key up."""

    def __post_init__(self) -> None:
        check_value("looks", self.looks, least=0, most=1)

    max_turns = 1
    max_new_tokens = 80
    success_reward = 1.0
    reward_sees = "what the agent returned; never whether it was looked up"
    rates: ClassVar[Mapping[str, str]] = {"looked_up": "episodes with a second call of the model"}

    def draw(self, rng: Random) -> Episode:
        store, key = {key: rng.choice(CONTENTS) for key in KEYS}, rng.choice(KEYS)
        return {"id": f"{key} of {''.join(store.values())}", "question": key, "answer": store[key], "store": store}

    def suites(self) -> Mapping[str, Sequence[Episode]]:
        rng = Random("held out")
        return {"held out": [self.draw(rng) for _ in range(_EPISODES)]}

    def make_env(self, episode: Episode) -> DatasetQAEnv:
        return DatasetQAEnv(episode)

    def measure(self, played: Mapping[str, Sequence[Played]]) -> dict[str, float]:
        infos = [rollout.steps[-1].info for episodes in played.values() for _, rollout in episodes]
        return {"looked_up": share(info.get("call", 0) > 0 for info in infos)}

    def show(self, episode: Episode, rollout: Rollout) -> Shown:
        return Shown(f"what is under {episode['question']}?", transcript(rollout), str(episode["answer"]))

    @property
    def teach(self) -> Callable[[str, Random], str]:
        return self._teach

    def _teach(self, prompt: str, rng: Random) -> str:
        """A result of the tool is repeated; a question is looked up, or guessed."""
        *_, last, _ = prompt.split("\n")
        if last.startswith("t:"):
            return last[2:]
        if rng.random() < self.looks:
            return f'<tool_call>{{"name": "look", "arguments": {{"key": "{last[2:]}"}}}}</tool_call>'
        return rng.choice(CONTENTS)


async def run_errand(session: Session) -> str:
    """The agent: asks the model, does what it calls for, and returns its first answer."""
    store, client = session.row["store"], session.client()
    messages: list[Any] = list(session.messages)
    for _ in range(MAX_TURNS):
        response = await client.chat.completions.create(model=session.model, messages=messages, tools=[LOOK])
        answer = response.choices[0].message
        if not answer.tool_calls:
            return answer.content or ""
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls:
            try:
                found = store.get(str(json.loads(call.function.arguments)["key"]), "nothing")
            except (ValueError, TypeError, KeyError):
                found = "nothing"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return ""
