"""Objects from the names in a recipe: the task, the algorithm, its controllers, the callbacks, the
trainer's configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ludic.agents.tool_agent import ToolUse, find_tools
from ludic.errors import ConfigError, check_value, did_you_mean
from ludic.recipes.actors import uses_pool, uses_queue
from ludic.recipes.agent_section import build_agent, has_agent
from ludic.recipes.named_sources import GIVEN_TASKS
from ludic.recipes.schema import NULL_UNLESS_SET, Recipe, TaskSection
from ludic.recipes.sections import CallbacksSection, ControllersSection, RLCallbacksSection, build_info_seed, check_reference
from ludic.tasks import Addition, Code, DigitSort, EpisodicTask, Rising, Task, TicTacToe, Tools, as_episodic
from ludic.tasks.agents import WithAgent
from ludic.tasks.code import CodeData
from ludic.tasks.data_task import DataTask, TaskData
from ludic.tasks.episodic import WithTools
from ludic.tasks.errand import Errand
from ludic.tasks.harbor import Harbor
from ludic.tasks.judged import judged_by
from ludic.tasks.reasoning_gym import ReasoningGym
from ludic.tasks.rewards import success_of
from ludic.tasks.shapes import Shapes
from ludic.tasks.terminal import Terminal
from ludic.training.algorithm import RLAlgorithm, compose_preprocess
from ludic.training.callbacks import Callback, CompletionTable, KeepBest, OffPolicyGuard, PushToHub, StopOnMetric
from ludic.training.callbacks.base import check_watched
from ludic.training.coefficients import Coefficient
from ludic.training.config import TrainerConfig
from ludic.training.controllers import Controller, EntropyController, EntropySchedule, KLController, MetaController
from ludic.training.controllers.entropy import check_reachable
from ludic.training.credit_assignment import BranchReturn, GroupNormalizedReturn, MonteCarloReturn, OverlongPenalty
from ludic.training.filters import drop_incomplete_completions
from ludic.training.group_credit import EachRewardNormalized
from ludic.training.judge import Judge, JudgeSettings
from ludic.training.presets.preprocess import add_info_seed
from ludic.training.presets.registry import REGISTRY
from ludic.training.reward_functions import CODE_REWARDS, RewardFunctions, given_rewards, required_arguments
from ludic.training.types import CreditAssigner, RolloutScorer, SAWBatch
from ludic.user_objects import import_named

C = TypeVar("C", bound=TrainerConfig)
T = TypeVar("T")

TASKS: dict[str, Callable[..., Task | EpisodicTask]] = {
    "sort": DigitSort,
    "addition": Addition,
    "code": Code,
    "reasoning_gym": ReasoningGym,
    "rising": Rising,
    "tictactoe": TicTacToe,
    "tools": Tools,
    "errand": Errand,
    "shapes": Shapes,
    "terminal": Terminal,
    "harbor": Harbor,
}


def build_task(
    section: TaskSection, *, data: Any = None, streaming: bool = False, reward: Any = None, eval_reward: Any = None, **others: Any
) -> Task | EpisodicTask:
    """A built-in task by its name, the user's own class as `package.module:Class`, or a data set
    with reward functions or a reward model. `others`: more arguments of `DataTask`."""
    if section.kind == "data":
        explicit = {"reward": reward, "eval_reward": eval_reward, **others}
        make: Callable[..., Task | EpisodicTask] = DataTask
        if isinstance(reward, str) and reward in CODE_REWARDS:
            if others.get("reward_weights") is not None or eval_reward is not None:
                raise ConfigError(f"reward={reward} must be the only reward; leave reward_weights and eval_reward out")
            make, explicit = CodeData, {"partial_credit": CODE_REWARDS[reward]}
        names = [field.name for field in fields(TaskData) if field.name not in ("source", "streaming")]
        rows = TaskData(data, streaming=streaming, **{name: value for name, value in section.args.items() if name in names})
        rest = {name: value for name, value in section.args.items() if name not in names}
        return _call(make, {**rest, **explicit, "data": rows}, "task.args", also=names)
    if section.kind == "harbor" and not streaming and (reward or eval_reward) is None:
        return _call(Harbor, {**section.args, "data": data}, "task.args")
    if streaming or any(given is not None for given in (data, reward, eval_reward)):
        raise ConfigError(f"data, reward and streaming need task.kind=data; task.kind ({section.kind}) makes its own problems")
    return build_named(TASKS, section)


def build_named(registry: dict[str, Callable[..., Any]], section: TaskSection) -> Any:
    """Make the registry's entry of that name, or the user's own class, given as an object or as
    `package.module:Class`, with the section's arguments."""
    if ":" in section.kind:
        make = import_named(section.kind, "task.kind")
    else:
        known = {**registry, **GIVEN_TASKS.now}
        make = _look_up(known, section.kind, "task.kind", own="module:Class, or in its script a class")
    return _call(make, section.args, "task.args")


def build_episodic_task(recipe: Recipe) -> EpisodicTask:
    """The task of a recipe, of any kind, as an `EpisodicTask`, with the recipe's tools. Raises
    ConfigError for what `evaluation.solved_at` cannot mean for it."""
    names = ("data", "streaming", "reward", "reward_weights", "eval_reward", "eval_reward_weights")
    judged = recipe.reward_model is not None
    given = [
        each for names in (recipe.reward, recipe.eval_reward) for each in ([names] if isinstance(names, str) else names or ())
    ]
    if recipe.judge != JudgeSettings() and "judge" not in given:
        raise ConfigError("judge.* are settings of a reward; set reward=judge or eval_reward=judge too")
    with given_rewards({"judge": build_judge(recipe)} if "judge" in given else {}):
        task = as_episodic(build_task(recipe.task, **{name: getattr(recipe, name) for name in names}, judged=judged))
    for name in ("max_turns", "max_new_tokens"):
        number = getattr(task, name)
        remedy = "make it a property" if callable(number) else ""
        check_value(f"{name} of the task {recipe.task.kind}", number, remedy, whole=True, least=1)
    success_of(task, recipe.evaluation.solved_at, judged=judged)
    functions, rollout = find_tools(recipe.tools, **asdict(recipe.mcp)), recipe.rollout
    agent = build_agent(recipe.agent, context=recipe.trainer.max_seq_len, in_task=isinstance(task, Harbor))
    if "verified" in given and recipe.agent.verify is None:
        raise ConfigError("reward=verified is the number that a command writes; set agent.verify=[...] too")
    if agent is not None:
        if task.max_turns > 1 and not isinstance(task, Harbor):
            raise ConfigError(
                f"an agent needs a task of one turn, and {recipe.task.kind} has up to {task.max_turns}; leave it out"
            )
        return WithAgent(task, agent)
    if not functions:
        return task
    return WithTools(task, ToolUse(functions, rollout.max_tool_turns, rollout.tool_timeout_s, rollout.malformed_tool_calls))


def build_judge(recipe: Recipe) -> Judge:
    """The judge of a recipe. Its verdicts are in the folder of all runs, unless `judge.cache` names
    another."""
    return Judge(**{**vars(recipe.judge), "cache": recipe.judge.cache or str(Path(recipe.output).expanduser() / ".judge")})


def build_curriculum(recipe: Recipe, task: EpisodicTask) -> Any:
    """The policy that picks problems; None without one. Raises ConfigError for a task that makes
    problems instead of having a list."""
    section, problems = recipe.curriculum, task.problem_list
    if section.kind is None:
        return None
    if problems is None:
        made = f"task.kind ({recipe.task.kind}) makes new ones"
        raise ConfigError(f"curriculum.kind ({section.kind}) picks problems of a list, and {made}; set data=FILE")
    from ludic.training.rollouts.curriculum import POLICIES

    own = import_named(section.kind, "curriculum.kind") if ":" in section.kind else None
    make = own or _look_up(POLICIES, section.kind, "curriculum.kind", own="module:Class")
    policy = _call(make, {**section.args, "num_problems": len(problems.training), "seed": recipe.seed}, "curriculum.args")
    if not hasattr(policy, "pick"):
        raise ConfigError(
            f"curriculum.kind ({section.kind}) made {type(policy).__name__}; it must have pick(seen, count, step, rng)"
        )
    return policy


def add_reward_model(recipe: Recipe, task: EpisodicTask, tokenizer: Any) -> EpisodicTask:
    """The task, with the recipe's reward model, if there is one, as its reward in training.
    `tokenizer` is the policy's; reward functions get it too."""
    if isinstance(task.training_scorer, RewardFunctions):
        task.training_scorer.tokenizer = tokenizer
    if recipe.reward_model is None:
        return task
    cfg = recipe.trainer
    derived = {"source": recipe.reward_model, "device": cfg.model_device, "max_seq_len": cfg.max_seq_len}
    arguments = {**recipe.reward_model_args, **derived, "task": task, "tokenizer": tokenizer}
    return _call(judged_by, arguments, "reward_model_args")


def build_algorithm(recipe: Recipe, *, max_completion_tokens: int | None = None) -> RLAlgorithm:
    """The preset, or the function of your own, that the recipe names, with `algorithm_args`.

    The group size is taken from the rollouts, and InfoSeed's answers belong to the group;
    `max_completion_tokens`, the token limit of an answer, goes to presets that take it. Raises
    `ConfigError` for a reference that the run cannot have."""
    check_reference(recipe.reference, has_adapters=bool(recipe.lora.rank))
    if ":" in recipe.algorithm:
        make: Callable[..., RLAlgorithm] = import_named(recipe.algorithm, "algorithm")
        if not callable(make):
            raise ConfigError(f"algorithm ({recipe.algorithm}) is {type(make).__name__}; it must return an RLAlgorithm")
    else:
        make = _look_up(REGISTRY, recipe.algorithm, "algorithm", own="module:function").make
    explicit = dict(recipe.algorithm_args)
    parameters, info_seed = inspect.signature(make).parameters, build_info_seed(recipe.info_seed)
    compares = "group_size" in parameters and parameters["group_size"].default is inspect.Parameter.empty
    if compares and recipe.rollout.temperature == 0 and recipe.steps > 0:
        raise ConfigError(f"rollout.temperature (0) gives equal answers, and {recipe.algorithm} compares them; raise it")
    derived: dict[str, Any] = {"group_size": recipe.rollout.group_size, "max_completion_tokens": max_completion_tokens}
    if info_seed is not None and "info_seed" in parameters:
        derived["info_seed"] = info_seed
    elif info_seed is not None:
        derived["group_size"] += info_seed.num_seeds
        explicit.pop("group_size", None)  # the number of plain answers, as `check_rollouts` makes sure
    known = {name: value for name, value in derived.items() if name in parameters}
    algorithm: RLAlgorithm = _call(make, {**known, **explicit}, "algorithm_args")
    if not isinstance(algorithm, RLAlgorithm):
        raise ConfigError(f"algorithm ({recipe.algorithm}) returned {type(algorithm).__name__}; it must return an RLAlgorithm")
    if recipe.process_reward:
        from ludic.training.loss.base import adapted_loss
        from ludic.training.process_rewards import ProcessReward

        if algorithm.batch_credit is not None or adapted_loss(algorithm).weighs_answers:
            raise ConfigError(f"process_reward gives credit to tokens, and {recipe.algorithm} weighs whole answers; leave it out")
        credit = _call(ProcessReward, {"group_size": derived["group_size"], **recipe.process_reward}, "process_reward")
        algorithm = _with_credit(algorithm, credit)
    if isinstance(algorithm.credit_assigner, MonteCarloReturn) and has_agent(recipe.agent):
        algorithm = _with_credit(algorithm, BranchReturn(algorithm.credit_assigner.gamma))
    if algorithm.greedy_baseline and (uses_queue(recipe) or uses_pool(recipe) or info_seed is not None):
        others = "place.actors, queue.url, rollout.over_sampling_factor, rollout.group_filter and info_seed"
        raise ConfigError(f"algorithm ({recipe.algorithm}) adds a greedy answer to each group; leave out {others}")
    if recipe.rollout.mask_truncated:
        then = [] if algorithm.preprocess is None else [algorithm.preprocess]
        algorithm = replace(algorithm, preprocess=compose_preprocess(_drop_incomplete, *then))
    return algorithm if "info_seed" in known else add_info_seed(algorithm, info_seed)


def normalize_each(algorithm: RLAlgorithm, scorer: RolloutScorer | None) -> RLAlgorithm:
    """The algorithm, with credit that normalises the scorer's reward functions apart. Raises
    ConfigError without such functions, or for an algorithm that does not normalise in groups."""
    credit = algorithm.credit_assigner
    inner = credit.inner if isinstance(credit, OverlongPenalty) else credit
    if not (isinstance(scorer, RewardFunctions) and isinstance(inner, GroupNormalizedReturn) and inner.normalize_adv):
        needed = "reward functions, and an algorithm that normalises rewards in groups, such as grpo"
        raise ConfigError(f"reward_normalize (each) needs {needed}; the algorithm is {algorithm.name}")
    return _with_credit(algorithm, EachRewardNormalized(inner, dict(zip(scorer.names, scorer.weights, strict=True))))


def _with_credit(algorithm: RLAlgorithm, credit: CreditAssigner) -> RLAlgorithm:
    """The algorithm with another credit assigner, below the penalty for long answers if it has
    one."""
    own = algorithm.credit_assigner
    return replace(algorithm, credit_assigner=replace(own, inner=credit) if isinstance(own, OverlongPenalty) else credit)


def _drop_incomplete(batch: SAWBatch) -> SAWBatch:
    return replace(batch, items=[item for item in batch.items if drop_incomplete_completions(item)])


def build_trainer_config(section: Any, **derived: Any) -> TrainerConfig:
    """The config of a `trainer` section. `derived`: the fields that follow from the recipe
    (`schema.DERIVED`)."""
    return build_config(TrainerConfig, section, **derived)


def check_device(name: str) -> None:
    """Raise `ConfigError` for a device that torch does not know or that this machine does not
    have."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"trainer.model_device ({name}) must be a torch device, such as cpu, cuda or cuda:1") from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"trainer.model_device ({name}): torch finds {count} GPUs, counted from cuda:0; set another, or cpu")


def build_config(config: type[C], section: Any, **derived: Any) -> C:
    """Make the config from a section. Fields at the section's default are not passed, since the
    config records which settings are explicit (`was_set`)."""
    check_device(section.model_device)
    defaults = asdict(config()) | dict.fromkeys(NULL_UNLESS_SET)
    explicit = {name: value for name, value in asdict(section).items() if value != defaults[name]}
    return config(**explicit, **derived)


def _look_up(registry: dict[str, T], name: str, setting: str, *, own: str) -> T:
    """The entry of that name. `own`: what else may be named, for the message."""
    if name in registry:
        return registry[name]
    remedy = did_you_mean(name, registry, f"there are {', '.join(sorted(registry))}", count=2)
    raise ConfigError(f"{setting} ({name}) is not known{remedy}, or {own} of your own")


def _call(make: Callable[..., Any], arguments: dict[str, Any], setting: str, *, also: Sequence[str] = ()) -> Any:
    """`make(**arguments)`. An argument that it does not take is a ConfigError with a suggestion,
    which may be one of `also`."""
    accepted = [*inspect.signature(make).parameters, *also]
    for name in arguments:
        if name not in accepted:
            remedy = did_you_mean(name, accepted, f"it takes {', '.join(accepted)}")
            raise ConfigError(f"{setting}.{name}: {getattr(make, '__name__', make)} has no such argument{remedy}")
    missing = [name for name in required_arguments(make) if name not in arguments]
    if missing:
        raise ConfigError(f"{getattr(make, '__name__', make)} needs {' and '.join(missing)}; set {setting}.{missing[0]}=VALUE")
    return make(**arguments)


def build_controllers(section: ControllersSection, algorithm: RLAlgorithm, *, group_size: int) -> list[Controller]:
    """The controllers of a recipe. Raises `ConfigError` for settings that do not fit the
    algorithm."""
    schedule, kl, entropy = None, section.kl, section.entropy
    if entropy.target is not None or entropy.start is not None or entropy.final is not None:
        schedule = EntropySchedule(entropy.target, entropy.start, entropy.final, entropy.horizon)
        check_reachable(schedule, group_size)
    if section.meta.method is not None:
        return [_build_meta(section, schedule, algorithm)]
    controllers: list[Controller] = []
    if kl.target and kl.horizon and kl.step_size:
        beta = _require(algorithm, "beta", "controllers.kl")
        controllers.append(KLController(beta, **vars(kl)))
    if schedule is not None and entropy.lr:
        tau = _require(algorithm, "tau", "controllers.entropy")
        settings = {name: getattr(entropy, name) for name in ("lr", "least", "most", "warmup_steps")}
        controllers.append(EntropyController(tau, target=schedule, **settings))
    return controllers


def _build_meta(section: ControllersSection, schedule: EntropySchedule | None, algorithm: RLAlgorithm) -> MetaController:
    meta = section.meta
    if schedule is None and not section.kl.target:
        raise ConfigError(f"controllers.meta.method ({meta.method}) needs controllers.entropy.target or controllers.kl.target")
    if schedule is not None:
        _require(algorithm, "tau", "controllers.entropy.target")
    if section.kl.target:
        _require(algorithm, "beta", "controllers.kl.target")
    return MetaController(
        algorithm.coefficients.get("tau"),
        algorithm.coefficients.get("beta"),
        entropy_target=schedule,
        kl_target=section.kl.target or None,
        tau_least=section.entropy.least,
        tau_most=section.entropy.most,
        **vars(meta),
    )


_COEFFICIENTS = {
    "tau": "it belongs to algorithm=maxent_grpo",
    "beta": "set algorithm_args.beta (maxent_grpo) or algorithm_args.reference_kl above 0",
}
"""Coefficient -> what gives an algorithm one."""


def _require(algorithm: RLAlgorithm, name: str, setting: str) -> Coefficient:
    if name not in algorithm.coefficients:
        raise ConfigError(f"{setting} controls {name}, which {algorithm.name} does not have; {_COEFFICIENTS[name]}")
    return algorithm.coefficients[name]


def build_callbacks(section: CallbacksSection, *, console: Any = None) -> list[Callback]:
    """The callbacks that the settings name; tables are printed on `console`. Raises ConfigError for
    settings that contradict each other, MissingExtraError without huggingface_hub."""
    built: list[Callback] = []
    stop = section.stop
    if section.keep_best is not None:
        built.append(KeepBest(section.keep_best, mode=section.keep_best_mode))  # type: ignore[arg-type]
    if stop.metric is not None:
        built.append(StopOnMetric(stop.metric, at=stop.at, patience=stop.patience, min_delta=stop.min_delta, mode=stop.mode))  # type: ignore[arg-type]
    if section.push_to_hub is not None:
        built.append(PushToHub(section.push_to_hub, private=section.private))
    if isinstance(section, RLCallbacksSection) and section.completions_every:
        built.append(CompletionTable(every=section.completions_every, rows=section.completions, console=console))
    if isinstance(section, RLCallbacksSection) and section.guard.ess is not None:
        built.append(OffPolicyGuard(**vars(section.guard)))
    own = [section.own] if isinstance(section.own, str) else section.own or []
    if not isinstance(own, list) or not all(isinstance(path, str) for path in own):
        raise ConfigError(f"callbacks.own ({own}) must be package.module:name, or a list of these")
    return [*built, *map(_import_callback, own)]


def check_callbacks(section: CallbacksSection, cfg: TrainerConfig, *, measured: Sequence[str] | None = None) -> None:
    """Raise ConfigError for callbacks that could never act: a metric of evaluations that do not
    take place or, if they are known, do not measure it."""
    check_watched(build_callbacks(section), cfg.eval_every_n_steps, measured=measured)


def _import_callback(path: str) -> Callback:
    found = import_named(path, "callbacks.own")
    made = found
    if callable(found) and not isinstance(found, Callback):
        try:
            made = found()
        except TypeError as error:
            raise ConfigError(f"callbacks.own ({path}) cannot be called without arguments: {error}") from error
    if not isinstance(made, Callback):
        raise ConfigError(f"callbacks.own ({path}) is {type(made).__name__}; it must be a ludic.training.Callback or make one")
    return made
