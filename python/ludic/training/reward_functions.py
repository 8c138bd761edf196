"""Reward functions with the signature of TRL's, called once for all completions of a batch.

`fn(prompts, completions, **columns) -> list[float | None]`, one element per completion; None means
that the function does not apply to this completion, and a list of (place, float) rewards places in
it: positions in its `completion_ids`, or characters (start, end). `prompts` and `completions` are
lists of text, or of lists of messages if the data set has messages. Further keywords are the other
columns of the data set, as lists (a function that names `images` gets lists of PIL images, opened
when they are read), and `completion_ids`, `trainer_state`, `log_extra`, `log_metric` and `is_eval`
(whether the completions are measured and not trained on). A function gets the
keywords in its signature, or all if it has `**kwargs`. If its signature has them, it also gets
`tool_calls`: a list of a completion's calls, each a mapping with `name`, `arguments` (an object),
`result` (the text that the model got) and `failed`, and with the fields of OpenAI's format;
`tool_results`: the results alone; `verified`, the text that `agent.verify` wrote, or None; and
`group_ids`, equal for answers to one problem that are compared. It can be a coroutine function; all
coroutine functions of a batch run concurrently. A plain function blocks the thread that it runs in,
and may have a deadline.

`register_reward` names a function for the `reward` of a recipe; the built-in verifiers have names.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, TypeVar

from ludic.agents.tool_calls import calls_of
from ludic.data.rows_on_disk import Changed
from ludic.envs.dataset_qa_env import prompt_shown
from ludic.envs.ifeval import IFEvalReward
from ludic.envs.maths import TaggedMathReward, gsm8k_reward, math_reward
from ludic.errors import ConfigError, DataError, GradingError, LudicError, RolloutError, check_value, error_location
from ludic.event_loop import describe_error, run_in_daemon_thread
from ludic.images.content import show_content
from ludic.images.store import URI, current_store
from ludic.types import Message, Rollout, answers_of, group_of, read_list
from ludic.user_objects import GivenNames

logger = logging.getLogger(__name__)
T = TypeVar("T")

SHOWN_PROMPT = 80
"""Maximum characters of a prompt in an error message."""


MAX_HUNG_CALLS = 8
SLOW_CALL_S = 60.0
"""After so long, a call without a deadline is reported, once for each function."""


class RewardDeadlineExceeded(TimeoutError):
    """A reward function took longer than `timeout_s`."""


class CoroutineDeadlineExceeded(RewardDeadlineExceeded):
    """A coroutine function did, and was cancelled."""


class RewardsBroken(LudicError):
    """No reward of a function can be trusted: the run ends."""


class RewardsHung(RewardsBroken, RuntimeError):
    """More calls of reward functions hang than are allowed."""


class ThreadedCalls:
    """Calls plain functions in threads of their own, each with a deadline.

    A thread cannot be ended from outside: after the deadline it is left alone, and keeps its memory
    and its core until the function returns, or the process ends. At most `max_hung` such threads
    may be alive at a time.
    """

    def __init__(self, max_hung: int = MAX_HUNG_CALLS) -> None:
        self.max_hung = max_hung
        self._hung: set[object] = set()

    @property
    def hung(self) -> int:
        """Calls that are beyond their deadline and have not returned."""
        return len(self._hung)

    async def call(self, name: str, function: Callable[[], T], timeout_s: float) -> T:
        """`function()`. Raises RewardDeadlineExceeded after `timeout_s`; RewardsHung instead if
        that makes more than `max_hung` calls; and what the function raises."""
        call, is_done = object(), threading.Event()

        def work() -> T:
            try:
                return function()
            finally:
                is_done.set()
                self._hung.discard(call)

        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return await run_in_daemon_thread(work, name=f"reward {name}")
        except TimeoutError as error:
            if not deadline.expired():
                raise
            self._hung.add(call)
            if is_done.is_set():  # it ended between the deadline and now
                self._hung.discard(call)
            if self.hung > self.max_hung:
                raise RewardsHung(
                    f"{self.hung} calls of reward functions have not returned {timeout_s:g} s after they began, the last of {name}; "
                    f"at most {self.max_hung} may hang. Give the function a deadline of its own, or raise reward_timeout_s"
                ) from error
            raise RewardDeadlineExceeded(f"it took longer than {timeout_s:g} s (reward_timeout_s); it goes on") from error


def is_coroutine_function(function: Callable[..., object]) -> bool:
    """Whether a call returns a coroutine, and so cannot block."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@contextmanager
def report_slow_call(name: str, reported: set[str], after_s: float = SLOW_CALL_S) -> Iterator[None]:
    """Log a warning, once for each function, if the block takes longer than `after_s`: nothing else
    runs in the event loop meanwhile. It names the line that is being executed."""
    thread = threading.get_ident()

    def warn() -> None:
        if name in reported:
            return
        reported.add(name)
        frame = sys._current_frames().get(thread)
        place = "its thread has ended"
        if frame is not None:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        logger.warning(
            "reward function %s has been running for %g s (%s), and everything waits for it; set reward_timeout_s to give it a deadline",
            name,
            after_s,
            place,
        )

    timer = threading.Timer(after_s, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass
class TrainerState:
    """The state of the run that a reward function can read."""

    global_step: int = 0
    """Number of batches trained on before this one."""


class RewardFunctions:
    """A scorer for `RolloutEngine`: adds the weighted sum of the functions' results to the reward
    of each rollout's last step.

    A function that returns None for a completion is left out of its sum. The info of the last step
    has `rewards/NAME` for each function that applied, and `reward_log` with the values passed to
    `log_extra` and `log_metric`. Of answers that are trained on, places keep their rewards.

    A missing reward is an error of its rollout and never counts as 0: if no function applied, if an
    element is not finite or is an exception, or if a function raised. A function that raises is
    called again for each group, so only the groups on which it fails are lost. Another number of
    rewards than completions ends the run: `score` raises WrongLength.

    **Deadline.** A coroutine function that exceeds `timeout_s` is cancelled and not called again.
    A plain function has a deadline only if `plain_timeout_s` is set: it then runs in a thread of
    its own, and is called again for each group after the deadline, so that one hung group does not
    cost the batch. The thread cannot be ended; with more than `max_hung` of them `score` raises
    RewardsHung. Without it, plain functions run in the thread of the event loop, where they can use
    signals, as the timeout of math-verify does; in a thread they cannot.
    """

    def __init__(
        self,
        functions: RewardFunction | Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        *,
        timeout_s: float = 600.0,
        plain_timeout_s: float | None = None,
        trainer_state: TrainerState | None = None,
        is_eval: bool = False,
        max_hung: int = MAX_HUNG_CALLS,
        tokenizer: Any = None,
    ) -> None:
        """Both deadlines: seconds for one call with all completions of a batch. `is_eval`: the
        rollouts are measured and not trained on. Functions with an argument of that name get it.
        `tokenizer`: the policy's, for rewards of characters."""
        self.functions = list(functions) if isinstance(functions, Sequence) else [functions]
        self.weights = [1.0] * len(self.functions) if weights is None else [float(weight) for weight in weights]
        if not self.functions:
            raise ConfigError("there must be at least one reward function")
        if len(self.weights) != len(self.functions):
            raise ConfigError(f"there are {len(self.weights)} weights for {len(self.functions)} reward functions; give one each")
        if not all(map(math.isfinite, self.weights)):
            raise ConfigError(f"the weights of reward functions must be finite, got {self.weights}")
        self.names = name_functions(self.functions)
        self.trainer_state = trainer_state or TrainerState()
        """Passed to functions with this argument."""
        self.is_eval, self.tokenizer = is_eval, tokenizer
        for name, seconds in (("timeout_s", timeout_s), ("plain_timeout_s", plain_timeout_s)):
            check_value(name, seconds, optional=True, above=0, below=math.inf)
        self.timeout_s, self.plain_timeout_s = timeout_s, plain_timeout_s
        self._threads, self._slow = ThreadedCalls(max_hung), set[str]()

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise ConfigError if a function has a required argument that is not in `columns`."""
        available = {*PROVIDED, *columns}
        for name, function in zip(self.names, self.functions, strict=True):
            missing = [needed for needed in required_arguments(function) if needed not in available]
            if missing:
                raise ConfigError(describe_missing(name, missing, columns))

    async def score(self, rollouts: Sequence[Rollout]) -> dict[str, Exception]:
        """Reward the rollouts in place. Returns rollout id -> error for those that could not be
        rewarded."""
        errors: dict[str, Exception] = {}
        inputs: list[_FunctionInput] = []
        for rollout in rollouts:
            try:
                inputs.append(_FunctionInput(rollout))
            except DataError as error:
                errors[rollout.id] = error
        if inputs:
            named = list(zip(self.names, self.functions, strict=True))
            first = await asyncio.gather(*(self._start(name, function, inputs) for name, function in named))
            columns = [
                await self._retry_by_group(name, function, inputs, result) if isinstance(result, Exception) else result
                for (name, function), result in zip(named, first, strict=True)
            ]
            for index, entry in enumerate(inputs):
                failure = self._add_reward(entry.rollout, [column[index] for column in columns])
                if failure is not None:
                    errors[entry.rollout.id] = failure
        return errors

    def _start(
        self, name: str, function: RewardFunction, inputs: Sequence[_FunctionInput]
    ) -> Awaitable[list[Reward] | Exception]:
        """Call the function now. Awaiting the result returns its rewards or its error."""
        log = _Log(inputs)
        arguments = self._arguments(function, inputs, log)
        if self.plain_timeout_s is not None and not is_coroutine_function(function):
            call = self._threads.call(name, lambda: function(**arguments), self.plain_timeout_s)
            return self._finish(name, call, inputs, log, has_deadline=True)
        try:
            with report_slow_call(name, self._slow):
                returned = function(**arguments)
        except Exception as error:
            returned = error
        except SystemExit as error:
            returned = exit_error(error)
        return self._finish(name, returned, inputs, log)

    async def _finish(
        self, name: str, returned: Any, inputs: Sequence[_FunctionInput], log: _Log, *, has_deadline: bool = False
    ) -> list[Reward] | Exception:
        try:
            if isinstance(returned, Exception):
                raise returned
            if has_deadline:
                returned = await returned
            if inspect.isawaitable(returned):
                returned = await self._await_result(returned)
            return check_rewards(name, returned, len(inputs))
        except RewardsBroken:
            raise
        except Exception as error:
            return error
        except SystemExit as error:
            return exit_error(error)
        finally:
            log.is_open = False

    async def _await_result(self, returned: Awaitable[Any]) -> Any:
        """Return the coroutine's result. Raises CoroutineDeadlineExceeded at the deadline; a
        TimeoutError that the function itself raises is an ordinary error."""
        deadline = asyncio.timeout(self.timeout_s)
        try:
            async with deadline:
                return await returned
        except TimeoutError as error:
            if deadline.expired():
                raise CoroutineDeadlineExceeded(f"it took longer than {self.timeout_s:g} s") from error
            raise

    async def _retry_by_group(
        self, name: str, function: RewardFunction, inputs: Sequence[_FunctionInput], error: Exception
    ) -> list[Reward]:
        """Call the function once per group, after the call for all completions has failed."""
        groups: dict[object, list[int]] = {}
        for index, entry in enumerate(inputs):
            groups.setdefault(entry.group, []).append(index)
        rewards: list[Reward] = [reward_failure(name, function, error, inputs[0])] * len(inputs)
        if len(groups) == 1 or isinstance(error, CoroutineDeadlineExceeded):
            return rewards
        if isinstance(error, RewardDeadlineExceeded):
            logger.warning("reward function %s: %s; it is called again for each of the %d groups", name, error, len(groups))
        for members in groups.values():
            result = await self._start(name, function, [inputs[index] for index in members])
            for position, index in enumerate(members):
                rewards[index] = (
                    reward_failure(name, function, result, inputs[index]) if isinstance(result, Exception) else result[position]
                )
        return rewards

    def _arguments(self, function: RewardFunction, inputs: Sequence[_FunctionInput], log: _Log) -> dict[str, Any]:
        rows = [entry.row for entry in inputs]
        names = dict.fromkeys(name for row in rows for name in row if name not in ("prompt", "completion", "completion_ids"))
        named = [name for name in NAMED if name in inspect.signature(function).parameters]
        arguments: dict[str, Any] = {name: [_read_info(entry.rollout, name) for entry in inputs] for name in named}
        arguments |= {name: [row.get(name) for row in rows] for name in names}
        if "images" in names and "images" in inspect.signature(function).parameters:
            store = current_store()
            listed = [row.get("images") or () for row in rows]
            arguments["images"] = [Changed(uris, lambda _, uri: store.open(uri.removeprefix(URI))) for uris in listed]
        if "group_ids" in inspect.signature(function).parameters:
            arguments["group_ids"] = [entry.group for entry in inputs]
        arguments |= {
            "prompts": [entry.row["prompt"] for entry in inputs],
            "completions": [entry.completion for entry in inputs],
            "completion_ids": [entry.completion_ids for entry in inputs],
            "trainer_state": self.trainer_state,
            "is_eval": self.is_eval,
            "log_extra": log.add,
            "log_metric": lambda name, value: log.add(name, [value] * len(inputs)),
        }
        return {name: value for name, value in arguments.items() if accepts(function, name)}

    def _add_reward(self, rollout: Rollout, rewards: Sequence[Reward]) -> Exception | None:
        """Add the weighted sum to the reward of the last step. Returns an error if there is no
        reward."""
        for name, reward in zip(self.names, rewards, strict=True):
            if isinstance(reward, NoReward):
                return GradingError(f"reward function {name} returned {reward} for {_shown_prompt(rollout)}")
            if isinstance(reward, Exception):
                return reward
        each = zip(self.names, self.weights, rewards, strict=True)
        applied = [(name, weight, reward) for name, weight, reward in each if isinstance(reward, float | list)]
        if not applied:
            return GradingError(f"every reward function returned None for the answer to {_shown_prompt(rollout)}")
        sums = {name: each if isinstance(each, float) else math.fsum(part for _, part in each) for name, _, each in applied}
        plain, located = [], []
        for name, weight, reward in applied:
            if isinstance(reward, float) or self.is_eval:
                plain.append(weight * sums[name])
                continue
            from ludic.training.process_rewards import locate

            try:
                located += locate(rollout, [(place, weight * each) for place, each in reward], self.tokenizer)
            except DataError as error:
                return GradingError(f"reward function {name} returned {error} for {_shown_prompt(rollout)}")
        last = rollout.steps[-1]
        last.reward += math.fsum(plain)
        for step, place in located:
            step.reward += place[-1]
            step.info.setdefault("process_rewards", []).append(place)
        last.info.update({f"rewards/{name}": total for name, total in sums.items()})
        return None


def _read_info(rollout: Rollout, name: str) -> Any:
    """A keyword of `NAMED`, from the info of the steps."""
    if name == "verified":
        return rollout.steps[-1].info.get(name)
    if name == "tool_results":
        return [text for step in rollout.steps for text in step.info.get(name) or ()]
    return [call for step in rollout.steps for call in calls_of(step.info)]


class _Log:
    """What a call of a function logs. A call beyond its deadline logs nothing any more."""

    def __init__(self, inputs: Sequence[_FunctionInput]) -> None:
        self._inputs = inputs
        self.is_open = True

    def add(self, column: str, values: Sequence[Any]) -> None:
        if self.is_open:
            for entry, value in zip(self._inputs, values, strict=True):
                entry.rollout.steps[-1].info.setdefault("reward_log", {})[column] = value


class _FunctionInput:
    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.row = find_row(rollout)
        self.completion = build_completion(rollout, conversational=isinstance(self.row["prompt"], list))
        answers = (read_list(step.trace, "completion_token_ids") for step in answers_of(rollout) if step.trace is not None)
        self.completion_ids, group = [token for answer in answers for token in answer], group_of(rollout.meta)
        self.group = rollout.id if group is None else group


def find_row(rollout: Rollout) -> Mapping[str, Any]:
    """Return the data set's row of a rollout: `row` in the info of a step (see `PromptEnv`), or
    in the request's meta. Raises DataError if there is none."""
    places = [step.info for step in reversed(rollout.steps)] + [rollout.meta.get("request_meta") or {}]
    row = next((place["row"] for place in places if "row" in place), None)
    if row is None or "prompt" not in row:
        raise DataError(f"rollout {rollout.id} does not carry the row it played; use PromptEnv, or set 'row' in request.meta")
    return dict(row)


def build_completion(rollout: Rollout, *, conversational: bool) -> str | list[Message]:
    """Return the model's text: a string, or messages if `conversational` or if the episode has
    several answers. Calls of tools before an answer are not part of it. Of an agent's episode it is
    what the agent returned."""
    answers, agent = answers_of(rollout), rollout.meta.get("agent")
    if agent is not None:
        return [{"role": "assistant", "content": agent["output"]}] if conversational else str(agent["output"])
    if not conversational and len(answers) == 1:
        return answers[0].action
    messages: list[Message] = []
    for step in answers:
        messages.append({"role": "assistant", "content": step.action})
        if step.next_obs is not None:
            messages.append({"role": "user", "content": step.next_obs})
    return messages


def _shown_prompt(rollout: Rollout) -> str:
    text = show_content(prompt_shown(find_row(rollout)["prompt"]))
    return f"the prompt {text if len(text) <= SHOWN_PROMPT else text[: SHOWN_PROMPT - 3] + '...'!r}"


Reward = float | list[tuple[Any, float]] | None | Exception
"""Result of one function for one completion: a number, (place, number)s, None if it does not apply,
or an error."""


class NoReward(GradingError):
    """An element that is neither a finite number nor None."""


class WrongLength(RewardsBroken, DataError):
    """The number of rewards differs from the number of completions, so that none belongs to one."""


def check_rewards(name: str, returned: Any, expected: int) -> list[Reward]:
    """What the function `name` returned for `expected` completions, as rewards. Raises `DataError`
    if it is no list, and `WrongLength` for another number of elements."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        raise DataError(f"it returned {type(returned).__name__}; it must return a list with one reward for each completion")
    if len(returned) != expected:
        raise WrongLength(f"reward function {name} returned {len(returned)} rewards for {expected} completions; return one each")
    return [_reward(element) for element in returned]


def _reward(element: Any) -> Reward:
    if element is None or isinstance(element, Exception):
        return element
    if isinstance(element, list | tuple):
        placed = list(map(_read_place, element))
        return next((each for each in placed if isinstance(each, NoReward)), placed)
    if isinstance(element, str):
        return NoReward(f"the text {element!r}, where a reward must be a number or None,")
    try:
        number = float(element)
    except (TypeError, ValueError, OverflowError):  # an integer beyond every float
        return NoReward(f"{element!r}, where a reward must be a number or None,")
    return number if math.isfinite(number) else NoReward(f"{number}, where a reward must be finite, or None,")


def _read_place(pair: Any) -> Any:
    """(position, reward) or ((start, end), reward); a `NoReward` for anything else."""
    place, value = (pair[0], _reward(pair[1])) if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
    ends: Any = place if isinstance(place, list | tuple) and len(place) == 2 else [place]
    if isinstance(value, float) and all(isinstance(end, Integral) for end in ends):
        return tuple(map(int, ends)) if len(ends) == 2 else int(ends[0]), value
    return NoReward(
        f"{[pair]!r}, where a reward must be a finite number or None, or a list of (position or (start, end), number),"
    )


def reward_failure(name: str, function: RewardFunction, error: Exception, entry: _FunctionInput) -> Exception:
    """Return the error of a function for a rollout."""
    reason = str(error)
    if not isinstance(error, LudicError | RewardDeadlineExceeded):
        code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
        place = error_location(error, None if code is None else code.co_filename)
        reason = f"{describe_error(error)} ({place})" if place else describe_error(error)
    failed = f"reward function {name} failed: {reason}"
    if isinstance(error, TypeError | AttributeError) and isinstance(entry.completion, list):
        failed += "; a completion is a list of messages here, the last text is completion[-1]['content']"
    failure = GradingError(failed)
    failure.__cause__ = error
    return failure


def exit_error(error: SystemExit) -> Exception:
    """The error of a function that ended the process, which goes on."""
    failure = RolloutError(f"it called sys.exit({error.code!r})")
    failure.__cause__ = error
    return failure


RewardFunction = Callable[..., Any]
NAMED = ("tool_calls", "tool_results", "verified")
"""Keywords of functions that name them, unless the data has columns of these names. `group_ids` is
one too, and goes before a column."""
PROVIDED = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "is_eval",
    "group_ids",
    *NAMED,
)
"""Keywords in addition to the columns of the data."""


def needed_columns(function: RewardFunction) -> list[str]:
    """The columns of the data without which the function cannot be called."""
    return [needed for needed in required_arguments(function) if needed not in PROVIDED]


def describe_missing(name: str, missing: Sequence[str], columns: Sequence[str]) -> str:
    """The error for columns that the function of this name needs and the data does not have.
    `columns`: those that it has, without the prompt."""
    known = f"its columns besides the prompt: {', '.join(columns)}" if columns else "it has none but the prompt"
    return f"reward function {name} asks for {' and '.join(missing)}, which the data does not have; {known}"


def name_functions(functions: Sequence[RewardFunction]) -> list[str]:
    """Return distinct names of the functions: `exact`, and `exact_2` for a second function with
    that name."""
    seen: Counter[str] = Counter()
    names: list[str] = []
    for function in functions:
        if not callable(function):
            raise ConfigError(f"a reward function must be callable, got {type(function).__name__}")
        inner = getattr(function, "func", function)  # functools.partial
        name = str(getattr(inner, "__name__", type(inner).__name__))
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return names


def accepts(function: RewardFunction, name: str) -> bool:
    """Whether the function can be called with the keyword `name`."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def required_arguments(function: RewardFunction) -> list[str]:
    """The arguments without a default."""
    fixed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [name for name, p in inspect.signature(function).parameters.items() if p.default is p.empty and p.kind not in fixed]


def verified_number(completions: Sequence[Any], verified: Sequence[str | None], **columns: Any) -> list[Any]:
    """The number in the last line that `agent.verify` wrote: 0 if it failed, None if there is no
    such command, GradingError for another text."""
    return [None if text is None else _last_number(text) for text in verified]


def _last_number(text: str) -> float | GradingError:
    if not text:
        return 0.0
    last = text.strip().rpartition("\n")[2]
    try:
        return float(last)
    except ValueError:
        return GradingError(f"the last line of agent.verify ({last!r:.200}) must be a number: the reward")


def _make_judge() -> Callable[..., Any]:
    from ludic.training.judge import Judge  # its server's client is imported when there is one

    return Judge()


MakeReward = Callable[[], Callable[..., Any]]
VERIFIERS: dict[str, MakeReward] = {
    "gsm8k": gsm8k_reward,
    "ifeval": IFEvalReward,
    "math": math_reward,
    "pure_accuracy_math": TaggedMathReward,
}
"""The built-in ones: 1 for a right answer, 0 for any other."""
SHARES: dict[str, MakeReward] = {
    "ifeval_instructions": partial(IFEvalReward, by_instruction=True),
    "judge": _make_judge,
    "verified": lambda: verified_number,
}
"""Built-in ones whose reward may be between 0 and 1."""
CODE_REWARDS = {"code": False, "code_partial": True}
"""Names for `reward` that are a task of their own, which runs programs -> whether some of the tests
earn a part of the reward."""
_OWN: dict[str, MakeReward] = {}
_GIVEN = GivenNames[Callable[..., Any]]("rewards")
given_rewards = _GIVEN.given


def register_reward(name: str, make: MakeReward | None = None, *, replace: bool = False) -> Any:
    """Let recipes name a reward. `make` takes no arguments and returns the reward function. Without
    `make` it is a decorator of that function. Raises ConfigError for a name that is taken; with
    `replace`, only for the name of a built-in one.

    >>> @register_reward("short")
    ... def make_short():
    ...     return lambda completions: [-float(len(text)) for text in completions]
    """
    if not name or ":" in name or not name.isprintable():
        raise ConfigError(f"the name of a reward ({name!r}) must be text without `:`, which separates a module from a function")
    if name in {**VERIFIERS, **SHARES} or (name in _OWN and not replace):
        raise ConfigError(f"there is a reward {name!r} already; register yours under another name")

    def register(made: MakeReward) -> MakeReward:
        if not callable(made):
            raise ConfigError(f"the reward {name!r} needs a function that makes it, got {type(made).__name__}")
        _OWN[name] = made
        return made

    return register if make is None else register(make)


def reward_names() -> list[str]:
    """All names, sorted."""
    return sorted({*VERIFIERS, *SHARES, *_OWN, *_GIVEN.now})


def make_reward(name: str) -> Callable[..., Any]:
    """The reward function of that name. Raises KeyError for an unknown one."""
    given = _GIVEN.now
    return given[name] if name in given else {**VERIFIERS, **SHARES, **_OWN}[name]()
