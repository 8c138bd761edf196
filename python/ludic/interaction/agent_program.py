"""Plays an episode with an agent of the user's own, which calls the model through a URL: its calls
become the steps of a rollout."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from math import inf
from time import monotonic
from typing import Any, Literal

from ludic.context import GivenDialog
from ludic.envs.env import LudicEnv
from ludic.envs.terminal import TerminalEnv
from ludic.envs.workspaces.workspace import Workspace
from ludic.errors import ConfigError, RolloutError, check_value
from ludic.event_loop import await_if_needed, describe_error, run_in_daemon_thread
from ludic.images.content import join_contents, show_content, to_openai
from ludic.images.store import current_store
from ludic.inference.client import SamplesTokens
from ludic.inference.gateway.gateway import Gateway
from ludic.inference.gateway.session import Answering, Call, Limits, Session, path_of
from ludic.inference.request import InferenceSpec
from ludic.interaction.agent_command import AgentCommand, AgentExitError
from ludic.interaction.agent_fork import AgentFork, check_agent
from ludic.interaction.single_agent import InteractionProtocol, merge_step_info, store_images
from ludic.types import Rollout, Step, StepOutcome
from ludic.user_objects import GivenNames, import_named

logger = logging.getLogger(__name__)

AgentFunction = Callable[[Session], Any]
"""Solves the problem of a session, and returns its answer as text; a plain or a coroutine
function."""
End = Literal["score", "lose"]

MEASURES = {
    "agent/calls": "model calls",
    "agent/branches": "branches of calls",
    "agent/continued": "calls that continue another",
    "agent/refused": "refused calls",
    "agent/undelivered": "answers not waited for",
    "agent/failed": "agent failed",
    "agent/timeouts": "agent timed out",
    "agent/seconds": "seconds",
    "agent/model_share": "share of waiting for the model",
}
"""Measures of an episode, in the info of its last step."""


@dataclass
class AgentUse:
    """An agent of the user's own, its limits, and how its calls are trained.

    Each process has one gateway for each client, made when the first episode is played.
    """

    function: AgentFunction
    timeout_s: float | None = 600.0
    """Of an episode, and again of its verification."""
    limits: Limits = field(default_factory=Limits)
    history: str = "template"
    """`template`: the model reads the history that the chat template shows. `sampled`: all that was
    sampled stays in it."""
    sampling: str = "run"
    """Whose settings of sampling count: of the `run`, or of the `harness`."""
    train: str | Callable[[Call], bool] = "all"
    """`all` calls, `main` for the path of the last one, or a function that chooses."""
    untrained_models: Sequence[str] = ()
    """Patterns of names: calls that ask for such a model are answered and not trained."""
    unsupported: str = "error"
    on_timeout: End = "score"
    """`score`: an episode that reaches `timeout_s` has the answer "". `lose`: it has failed."""
    on_error: End = "score"
    """The same for an agent that raises after it has called the model."""

    def __post_init__(self) -> None:
        check_value("agent.timeout_s", self.timeout_s, "null sets no limit", above=0, optional=True)
        check_value("agent.max_calls", self.limits.max_calls, least=1)
        check_value("agent.history", self.history, choices=("template", "sampled"))
        check_value("agent.sampling", self.sampling, choices=("run", "harness"))
        check_value("agent.unsupported", self.unsupported, choices=("error", "ignore"))
        if isinstance(self.train, str):
            check_value("agent.train", self.train, "or module:function", choices=("all", "main"))
        for name in ("on_timeout", "on_error"):
            check_value(f"agent.{name}", getattr(self, name), choices=("score", "lose"))
        self._gateways: dict[int, tuple[object, Gateway]] = {}
        self.told: set[str] = set()
        """Errors of the agent that were logged."""

    def gateway_of(self, client: object) -> Gateway:
        """The gateway to a client. Raises ConfigError for a client that cannot sample from ids."""
        if id(client) not in self._gateways:
            tokenizer = getattr(client, "tokenizer", None)
            if tokenizer is None or not isinstance(client, SamplesTokens):
                raise ConfigError(f"{type(client).__name__} has no tokenizer or no sample_tokens; agents need both of the client")
            gateway = Gateway(client, tokenizer, history=self.history, sampling=self.sampling, unsupported=self.unsupported)
            self._gateways[id(client)] = client, gateway
        return self._gateways[id(client)][1]

    def make_protocol(self, client: object, *, system_prompt: str | None) -> AgentProtocol:
        """The protocol that plays episodes with this client."""
        return AgentProtocol(self, self.gateway_of(client), system_prompt=system_prompt)

    def close(self) -> None:
        """End the gateways and the server of forks; the next episode starts them again."""
        if isinstance(self.function, AgentFork):
            self.function.close()
        while self._gateways:
            self._gateways.popitem()[1][1].stop()


@dataclass
class _Ended:
    output: str = ""
    status: str = "ended"
    """`ended`, `timeout` or `failed`."""
    error: Exception | None = None
    seconds: float = 0.0
    verified: str | None = None
    """What `agent.verify` wrote."""


class AgentProtocol(InteractionProtocol):
    """One episode of an agent in an environment of one turn: a session is opened, the agent works,
    and what it returns is the action. In a terminal task it works in the task's sandbox, which is
    judged.

    Every call that was answered, and that the agent has received, is a step with exactly the tokens
    that the model read and sampled. Its info has `call`, `parent` (the call that it continues, or
    None), `branch` (0 for the path of the last call), `shared` (leading tokens of the prompt that
    the parent has) and `reason`. The reward is on the last step. `meta["agent"]` has the `output`
    of the agent, which reward functions get as the completion, and counts.

    An agent that makes no call has failed, and so has an episode in which the engine failed: it is
    played again, and never scores.
    """

    def __init__(self, use: AgentUse, gateway: Gateway, *, system_prompt: str | None = None) -> None:
        self._use, self._gateway, self._system_prompt = use, gateway, system_prompt

    async def run(
        self,
        *,
        env: LudicEnv[str, str, str],
        max_steps: int,
        env_seed: int | None = None,
        sampling_seed: int | None = None,
        inference: InferenceSpec | None = None,
        timeout_s: float | None = None,
    ) -> list[Rollout]:
        """`timeout_s` is not used: a call has the deadline of the gateway, and the episode
        `AgentUse.timeout_s`."""
        observation, info = store_images(await await_if_needed(env.env_reset(seed=env_seed)))  # type: ignore[attr-defined]
        context = GivenDialog(self._system_prompt or getattr(env, "suggested_sysprompt", None))
        context.on_env_reset(observation, info)
        row = getattr(env, "sample", None)
        command = self._use.function if isinstance(self._use.function, AgentCommand) else None
        shell = env if isinstance(env, TerminalEnv) else None
        own: Any = nullcontext(await shell.open_sandbox() if shell else None)
        async with command.open_workspace(row or {}) if command and not shell else own as workspace:
            if command and not isinstance(workspace, Workspace):
                raise ConfigError("a command cannot reach the model from a sandbox of your own; use agent.function")
            session = self._gateway.open(
                sampling=(inference or InferenceSpec()).sampling,
                seed=sampling_seed,
                limits=self._use.limits,
                prompt=show_content(observation),
                messages=to_openai(context.on_before_act(), current_store()),
                row=row,
                workspace=workspace,
                socket=workspace.socket if isinstance(workspace, Workspace) else None,
            )
            try:
                if command and not shell:
                    await command.start(session)
                ended = await self._play(session, shell.seconds_left if shell else inf)
            finally:
                counted = await self._gateway.close_session(session)
            if (error := counted.error) is not None:
                raise RolloutError(f"the engine failed in a call of the agent: {describe_error(error)}") from error
            if not session.calls:
                why = f" ({describe_error(ended.error)})" if ended.error else ""
                raise RolloutError(f"the agent made no call that the model answered{why}") from ended.error
            trained = self._choose_trained(session.calls)
            if command and command.verify is not None:
                ended.verified = await self._verify(command, session)
        outcome = await (shell.judge() if shell else await_if_needed(env.env_step(ended.output)))  # type: ignore[attr-defined]
        return [make_rollout(trained, session.calls, ended, outcome, counted)]

    async def _play(self, session: Session, seconds: float) -> _Ended:
        """Run the agent. Raises RolloutError for an end that loses the episode."""
        ended, started = _Ended(), monotonic()
        limit = inf if self._use.timeout_s is None else self._use.timeout_s
        reached = "the task's deadline" if seconds < limit else f"agent.timeout_s ({limit:g})"
        seconds = min(seconds, limit)
        try:
            async with asyncio.timeout(None if seconds == inf else seconds) as deadline:
                ended.output = read_output(await self._call(session), session)
        except Exception as error:  # of the user's agent
            ended.status, ended.error = "failed", error
            ended.output = getattr(error, "output", "") if isinstance(error, AgentExitError) else ""
        finally:
            await session.close_clients()
        if deadline.expired():  # also if the agent made another error of it, or went on
            ended.status, ended.output = "timeout", ""
            ended.error = TimeoutError(f"it reached {reached}")
        ended.seconds = monotonic() - started
        rule = self._use.on_timeout if ended.status == "timeout" else self._use.on_error
        if ended.error is not None and (rule == "lose" or isinstance(ended.error, ConfigError)):
            raise RolloutError(f"the agent {ended.status}: {describe_error(ended.error)}") from ended.error
        if ended.error is not None and session.calls:
            self._tell("the agent", ended.error)
        return ended

    async def _verify(self, command: AgentCommand, session: Session) -> str:
        """What `verify` writes. One that fails is the agent's doing, as far as can be known: it has
        written nothing, unless `on_error` loses the episode."""
        try:
            async with asyncio.timeout(self._use.timeout_s):
                return await command.run_verify(session)
        except (TimeoutError, RolloutError) as error:
            if self._use.on_error == "lose":
                raise RolloutError(f"agent.verify failed: {describe_error(error)}") from error
            self._tell("agent.verify", error)
            return ""

    def _tell(self, who: str, error: Exception) -> None:
        """Log an error, each once."""
        if (told := f"{who} failed with {describe_error(error)}") not in self._use.told:
            self._use.told.add(told)
            logger.warning("%s; the same is not told again", told, exc_info=error)

    async def _call(self, session: Session) -> Any:
        function = self._use.function
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
            return await function(session)
        return await await_if_needed(await run_in_daemon_thread(lambda: function(session), name="agent"))

    def _choose_trained(self, calls: Sequence[Call]) -> list[Call]:
        """The calls that are trained. Raises RolloutError if there are none."""
        use = self._use
        kept = [call for call in calls if not any(fnmatchcase(call.model, pattern) for pattern in use.untrained_models)]
        if use.train == "main" and kept:
            path = set(path_of(kept[-1], calls))
            kept = [call for call in kept if call.number in path]
        elif callable(use.train):
            kept = [call for call in kept if use.train(call)]
        if not kept:
            raise RolloutError(f"none of the {len(calls)} calls is trained; change agent.train or agent.untrained_models")
        return kept


def read_output(value: Any, session: Session) -> str:
    """The answer that an agent returned; without one, the text of its last call. Raises ConfigError
    for anything but text."""
    if value is None:
        return str(session.calls[-1].answer.get("content") or "") if session.calls else ""
    if not isinstance(value, str):
        raise ConfigError(f"the agent returned {type(value).__name__}; it must return its answer as text, or None for its last")
    return value


def number_branches(calls: Sequence[Call]) -> dict[int, int]:
    """Number of a call -> number of its branch. Branch 0 is the path of the last call; then each
    call that no other continues has one, the latest first, with the part of its path that is new.

    Example: calls 0, 1 and 2, where 1 and 2 continue 0: branch 0 has 0 and 2, branch 1 has 1.
    """
    branches: dict[int, int] = {}
    continued = {call.parent for call in calls}
    leaves = [call for call in reversed(calls) if call.number not in continued]
    for number, leaf in enumerate(leaves):
        for each in path_of(leaf, calls):
            branches.setdefault(each, number)
    return branches


def make_rollout(
    trained: Sequence[Call], calls: Sequence[Call], ended: _Ended, outcome: StepOutcome, counted: Answering
) -> Rollout:
    """A rollout with a step for each trained call, in their order."""
    branches = number_branches(calls)
    later = [call for call in calls[1:] if call.parent is not None]
    counts = {"calls": len(calls), "branches": len(set(branches.values()))}
    counts |= {name: counted.counts[name] for name in ("refused", "undelivered")}
    measured = {
        "continued": len(later) / (len(calls) - 1) if len(calls) > 1 else 1.0,
        "failed": float(ended.status == "failed"),
        "timeouts": float(ended.status == "timeout"),
        "seconds": ended.seconds,
        "model_share": min(1.0, sum(call.seconds for call in calls) / max(ended.seconds, 1e-9)),
    }
    is_cut = ended.status == "timeout" or counts["refused"] > 0
    steps = [make_step(index, call, branches[call.number], calls) for index, call in enumerate(trained)]
    for step, following in pairwise(steps):
        step.next_obs = following.prev_obs
        step.info["intermediate_call"] = True
    last = steps[-1]
    last.reward, last.truncated, last.terminated = outcome.reward, is_cut or outcome.truncated, not (is_cut or outcome.truncated)
    extra: dict[str, Any] = {f"agent/{name}": value for name, value in {**counts, **measured}.items()}
    extra |= {"parsed_action": ended.output, **({} if ended.verified is None else {"verified": ended.verified})}
    last.info = merge_step_info(client_info=last.info, env_info=outcome.info, extra=extra)
    agent = {
        "output": ended.output,
        "status": ended.status,
        "error": None if ended.error is None else describe_error(ended.error),
        **counts,
        "seconds": round(ended.seconds, 3),
        "ignored": dict(counted.ignored),
    }
    meta = {"agent": agent, "episode_truncated": last.truncated, "truncation_reason": "agent" if last.truncated else None}
    return Rollout(steps=steps, meta=meta)


def make_step(index: int, call: Call, branch: int, calls: Sequence[Call]) -> Step:
    """The step of a call among all `calls` of its episode."""
    results = [
        show_content(message.get("content"))
        for child in calls
        if child.parent == call.number
        for message in child.messages
        if message.get("role") == "tool"
    ]
    info: dict[str, Any] = {
        "call": call.number,
        "parent": call.parent,
        "branch": branch,
        "shared": call.shared,
        "reason": call.reason,
        "dialect": call.dialect,
        "model": call.model,
        "policy_version": call.policy_version,
        "finish_reason": call.trace.finish_reason,
        "completion": call.text,
        "chat_completion": call.answer,
        "tool_results": results,
    }
    if call.weight_versions:
        info["weight_versions"] = list(call.weight_versions)
    seen = join_contents([message.get("content") or "" for message in call.messages], "\n")
    return Step(index, seen, call.text, None, 0.0, False, False, info, call.trace)


def describe_agent(rollout: Rollout) -> str:
    """What an episode of an agent shows, in a line: how many calls, which were not continued and
    why, and what of their settings was ignored."""
    agent, steps = rollout.meta["agent"], rollout.steps
    whole = [f"call {step.info['call']} ({step.info['reason']})" for step in steps[1:] if step.info["parent"] is None]
    parts = [
        f"{agent['calls']} call{'s' if agent['calls'] > 1 else ''} in {agent['seconds']:.1f} s",
        *([f"tokens were encoded again in {', '.join(whole)}"] if whole else []),
        *(["every later call continues an earlier one"] if len(steps) > 1 and not whole else []),
        *([f"ignored: {', '.join(f'{name}={value}' for name, value in agent['ignored'].items())}"] if agent["ignored"] else []),
        *([f"it failed with {agent['error']}"] if agent["error"] else []),
    ]
    return "; ".join(parts)


_GIVEN = GivenNames[AgentFunction]("agents")
given_agents = _GIVEN.given


def find_agent(name: str) -> AgentFunction:
    """The function of the setting `agent.function`. Raises ConfigError for a name that is not known
    and for what cannot be called."""
    return check_agent(name, _GIVEN.now[name] if name in _GIVEN.now else import_named(name, "agent.function"))
