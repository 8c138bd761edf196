"""Tasks of verifiers (`verifiers.v1`, 0.4) as an environment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from ludic.envs.adapters.episode import Episode, import_extra
from ludic.envs.adapters.verifiers_client import VerifiersClient, play_task
from ludic.envs.adapters.verifiers_rollouts import rollout_from_trace
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.errors import ConfigError, InferenceError, RolloutError
from ludic.inference.request import ChatCompletionRequest, InferenceSpec
from ludic.types import ChatResponse, Info, Message, StepOutcome

CLEANUP_TIMEOUT_S = 10.0
"""Time for verifiers to end a cancelled episode."""


class VerifiersEnv(SingleAgentEnv):
    """Tasks of a taskset, `list(verifiers.v1.load_taskset(...))`. The episode with seed s plays
    task number s modulo their count.

    verifiers plays the episode, harness and scoring included. The observation is the messages of
    its request to the model, the action is the answer. A failed episode of verifiers is a
    RolloutError, never a reward. Answers are text: use `VerifiersProtocol`, which connects a chat
    client directly, for tasks that give the model tools, and to keep the harness's prompts token
    for token.

    `agent`: a `verifiers.v1.AgentConfig` (harness, a runtime on this machine, limits); None asks
    the model once, in this process. `timeout_s` bounds the wait for verifiers between two answers
    of the model.
    """

    def __init__(self, tasks: Sequence[Any], *, agent: Any | None = None, timeout_s: float = 60.0) -> None:
        super().__init__()
        import_extra("verifiers.v1", "verifiers")
        if not tasks:
            raise ConfigError("tasks is empty; there is nothing to play")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s ({timeout_s}) must be > 0")
        self.agent = agent
        self._tasks = list(tasks)
        self._timeout_s = timeout_s
        self._episode = Episode("VerifiersEnv")
        self._caller = _Caller()
        self._playing: asyncio.Task[Any] | None = None
        self._system_prompt: str | None = None
        self._obs = ""

    def task(self, seed: int | None) -> Any:
        """The task of a seed; without a seed the first."""
        return self._tasks[(seed or 0) % len(self._tasks)]

    @property
    def suggested_sysprompt(self) -> str | None:
        """The system prompt of the current request."""
        return self._system_prompt

    async def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:  # type: ignore[override]  # hooks may be coroutines
        self._episode.begin()
        await self._stop()
        task = self.task(seed)
        self._caller = _Caller()
        policy_client = VerifiersClient(self._caller, InferenceSpec(), lambda call: None, None)
        self._playing = asyncio.create_task(play_task(task, policy_client, self.agent, model="policy", max_turns=None))
        request = await self._next_request()
        if request is None:
            raise self._failed("the episode ended before its first request to the model")
        self._obs = self._shown(request)
        return self._obs, {"task_idx": task.data.idx}

    async def env_step(self, action: str) -> StepOutcome:  # type: ignore[override]
        self._episode.check_step()
        self._caller.answer(action)
        request = await self._next_request()
        if request is not None:
            self._obs = self._shown(request)
            return StepOutcome(obs=self._obs, reward=0.0, truncated=False, terminated=False)
        assert self._playing is not None
        last = rollout_from_trace(self._ended()).steps[-1]
        scores = {key: last.info[key] for key in ("rewards", "metrics")}
        self._obs = json.dumps(scores)
        return StepOutcome(obs=self._obs, reward=last.reward, truncated=last.truncated, terminated=last.terminated, info=scores)

    def env_current_obs(self) -> str:
        self._episode.check_begun()
        return self._obs

    async def close(self) -> None:
        """Cancel the episode. Calls after the first do nothing."""
        if self._episode.close():
            await self._stop()

    async def _next_request(self) -> ChatCompletionRequest | None:
        """The next request to the model; None when verifiers has finished. Raises TimeoutError
        after `timeout_s` and cancels the episode."""
        assert self._playing is not None
        request = asyncio.ensure_future(self._caller.requests.get())
        try:
            done, _ = await asyncio.wait({request, self._playing}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not request.done():
                await _cancel(request)
        if request in done:
            return request.result()
        if self._playing in done:
            self._episode.end()
            return None
        self._episode.end()
        await self._stop()
        raise TimeoutError(f"VerifiersEnv: the episode sent no request and did not end within {self._timeout_s} s")

    def _ended(self) -> Any:
        assert self._playing is not None
        try:
            return self._playing.result()
        except Exception as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error

    def _failed(self, problem: str) -> RolloutError:
        if self._playing is not None and self._playing.done() and self._playing.exception() is None:
            errors = self._playing.result().errors
            problem += f" ({errors[-1].type}: {errors[-1].message})" if errors else ""
        return RolloutError(f"VerifiersEnv: {problem}")

    def _shown(self, request: ChatCompletionRequest) -> str:
        """The messages since the last answer, without the system prompt, which is stored."""
        if request.tools is not None:
            raise RolloutError("VerifiersEnv: the task gives the model tools; play it with VerifiersProtocol")
        self._system_prompt = "\n".join(_text(message) for message in request.messages if message["role"] == "system") or None
        news: list[str] = []
        for message in reversed(request.messages):
            if message["role"] == "assistant":
                break
            if message["role"] != "system":
                news.append(_text(message))
        return "\n".join(reversed(news))

    async def _stop(self) -> None:
        """Cancel the episode that is being played."""
        if self._playing is not None:
            playing, self._playing = self._playing, None
            await _cancel(playing)


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task, wait for its cleanup, and retrieve its exception, so that asyncio does not
    log it."""
    task.cancel()
    await asyncio.wait({task}, timeout=CLEANUP_TIMEOUT_S)
    if task.done() and not task.cancelled():
        task.exception()


class _Caller:
    """A chat client whose requests wait for `answer`, which the environment calls."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[ChatCompletionRequest] = asyncio.Queue()
        self._answer: asyncio.Future[str] | None = None

    async def complete(self, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        if self._answer is not None and not self._answer.done():
            raise InferenceError(
                "the harness sent a second request before the first was answered; play the task with VerifiersProtocol"
            )
        self._answer = asyncio.get_running_loop().create_future()
        self.requests.put_nowait(request)
        return ChatResponse(text=await self._answer, finish_reason="stop"), {}

    def answer(self, text: str) -> None:
        assert self._answer is not None
        self._answer.set_result(text)

    def sync_weights(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError("answers come from an agent, not from weights")


def _text(message: Message) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.get("text", "") for part in content)
