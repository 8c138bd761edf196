"""Reinforcement learning: build the policy, warm it up, measure, reinforce, measure again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ludic.errors import CheckpointError, ConfigError, RolloutError
from ludic.files.checkpoints import check_model_folder
from ludic.inference.local import LocalChatClient
from ludic.interaction.agent_program import describe_agent
from ludic.models.saving import save_policy
from ludic.models.state_files import read_model
from ludic.models.wrappers import has_adapters
from ludic.recipes.actors import check_actors, check_over_sampling, uses_pool, uses_queue
from ludic.recipes.build import build_curriculum, build_trainer_config
from ludic.recipes.compose import config_hash
from ludic.recipes.mixture import (
    Mixture,
    Source,
    add_reward_models,
    build_run_algorithm,
    build_run_task,
    list_parts,
    run_reducers,
)
from ludic.recipes.model import add_adapters, build_policy, check_adapters, has_no_weights
from ludic.recipes.processes import choose_kind, choose_logprob_convention
from ludic.recipes.schema import Recipe
from ludic.recipes.sections import build_info_seed, check_checkpoints, parse_steps
from ludic.runs.actors.policy_versions import PolicyVersions
from ludic.runs.actors.supervision import ActorProcesses, run_actors
from ludic.runs.actors.trainer_side import ActorBatches
from ludic.runs.base import RunParts, TrainingRun, has_checkpoint, restore_best_weights
from ludic.runs.control import check_control, check_critic, check_teacher, open_control, open_critic
from ludic.runs.curriculum import CurriculumRequests
from ludic.runs.data.sft import Warmup
from ludic.runs.directory import DONE, RunDirectory
from ludic.runs.held_out import Evaluation, check_watched_metrics, list_measured, make_held_out
from ludic.runs.loggers import Screen
from ludic.runs.report.reinforce import build_outcome, draw_rewards, show_report
from ludic.runs.rollouts import (
    OverSampledRollouts,
    PlayedBatches,
    check_rollouts,
    describe_over_sampling,
    make_engine,
    make_training_requests,
)
from ludic.runs.sampler import Sampler, check_inference, make_preflight, open_sampler
from ludic.runs.shared_model import check_sampling, choose_precision, place_model, prepare_sharding
from ludic.runs.trial import check_prompts, try_task, warn_of_long_prompts
from ludic.tasks import EpisodicTask
from ludic.tasks.episodic import logged_names
from ludic.training import ranks
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.overlapped import OverlappedSource
from ludic.training.batching.source import STOP_PATIENCE_S, BatchSourceBase
from ludic.training.config import TrainerConfig
from ludic.training.evaluators.protocol import eval_key
from ludic.training.loggers import TrainingLogger
from ludic.training.preflight.check import PreflightReport
from ludic.training.presets import make_sft
from ludic.training.reducers import default_reducers
from ludic.training.rng import seed_everything
from ludic.training.rollouts.engine import RolloutEngine
from ludic.training.stats import SAMPLED_REWARD
from ludic.training.trainer import Trainer

WARM_UP, REINFORCE = "warm_up", "reinforce"
WARM_UP_KEYS = ["train/loss", "train/grad_norm"]
REINFORCE_KEYS = [
    *(f"train/{SAMPLED_REWARD}", "train/reward_std", "train/frac_reward_zero_std", "train/loss", "train/grad_norm"),
    *("train/clip_frac", "train/entropy"),
    *("train/avg_completion_length", "train/min_completion_length", "train/max_completion_length"),
]


@dataclass
class RLParts(RunParts):
    """The objects of a run of `ludic train`."""

    task: EpisodicTask
    algorithm: RLAlgorithm
    warmup_cfg: TrainerConfig
    trainer_cfg: TrainerConfig
    warmup: Warmup


class RLRun(TrainingRun[Recipe, RLParts, RunDirectory]):
    """Warm-up, held-out measurement, reinforcement, and the measurement again."""

    def __init__(self, recipe: Recipe, parts: RLParts, directory: RunDirectory, screen: Screen) -> None:
        super().__init__(recipe, parts, directory, screen)
        self.task = parts.task
        if self.progress.phase == REINFORCE:
            self._load_warmed_up()
        place_model(parts.model, recipe.sharding, parts.trainer_cfg.model_device)
        self._client = LocalChatClient(parts.model, parts.tokenizer, max_batch_size=recipe.rollout.concurrency)
        self._held_out = make_held_out(recipe, parts.task, self._make_engine, parts.model, directory)

    @classmethod
    def build(cls, recipe: Recipe, note: Callable[[str], None]) -> RLParts:
        check_checkpoints(recipe.checkpoint)
        parse_steps(recipe.profile)
        check_actors(recipe)
        check_over_sampling(recipe)
        prepare_sharding(recipe.sharding, recipe.trainer.model_device)
        check_sampling(recipe)
        measured = recipe.task.args.get("heldout_data") if recipe.task.kind == "data" else None
        if recipe.data is None and measured is not None:
            raise ConfigError(
                f"the recipe {recipe.recipe} has no rows to train on: task.args.heldout_data ({measured}) is only measured, by `ludic eval "
                f"{recipe.recipe.removeprefix('eval-')}`; give data=FILE or a hub id to train on, and set rollout.temperature=1"
            )
        task = build_run_task(recipe)
        algorithm = build_run_algorithm(recipe, task)
        check_control(recipe, algorithm)
        for part in list_parts(recipe, task):
            check_rollouts(part.recipe, part.task)
        build_curriculum(recipe, task)
        seed_everything(recipe.seed)
        check_adapters(recipe)
        model, tokenizer = build_policy(recipe)
        check_critic(recipe, algorithm, tokenizer)
        for part in list_parts(recipe, task):
            check_prompts(part.recipe, part.task, tokenizer)
            warn_of_long_prompts(part.recipe, part.task, tokenizer, model)
            try_task(part.recipe, part.task, tokenizer, model)
        task = add_reward_models(recipe, task, tokenizer)
        if recipe.model is not None:
            model = add_adapters(model, recipe, seed=recipe.seed, device=recipe.trainer.model_device)
        check_inference(recipe, model)
        temperature = choose_logprob_convention(recipe.rollout).temperature
        derived = {"pad_token_id": tokenizer.pad_token_id, "seed": recipe.seed}
        warmup_cfg = build_trainer_config(recipe.warmup.trainer, **derived)
        cfg = build_trainer_config(recipe.trainer, **derived, temperature=temperature)
        if cfg.offload and not recipe.inference.colocate:
            raise ConfigError(
                "trainer.offload needs inference.colocate: only a server can sample meanwhile; set that, or leave it out"
            )
        if cfg.offload is None:
            cfg = replace(cfg, offload=recipe.inference.colocate)
        check_teacher(recipe, tokenizer, cfg)
        warmup = Warmup.read(recipe, task, tokenizer)
        check_watched_metrics(recipe, warmup_cfg, cfg, task)
        return RLParts(model, tokenizer, task, algorithm, warmup_cfg, cfg, warmup)

    @property
    def measured(self) -> list[str]:
        return list_measured(self.recipe, self.parts.task)

    def _load_warmed_up(self) -> None:
        """Read the policy after the warm-up. If the reinforcement has a checkpoint, any model of
        the same shape will do, since the trainer loads the checkpoint into it. Raises
        CheckpointError if there is none but `model` is already reinforced: the run writes the
        checkpoint of a step first, then `progress.steps`, then `model`."""
        model, directory, steps = self.parts.model, self.directory, self.progress.steps
        if has_checkpoint(directory.checkpoints / REINFORCE):
            if has_adapters(model) or not self.recipe.lora.rank:
                return
        else:
            if self.progress.recipe is None:  # an older version, which wrote `steps` later
                logged = max([steps, *(line["step"] for line in directory.read_metrics(REINFORCE))])
                steps = logged if logged >= self.recipe.steps else steps
            if steps:
                raise CheckpointError(
                    f"the checkpoint of {directory.model} ({steps} steps) in {directory.checkpoints} is gone; "
                    f"start a new run with model={directory.model} warmup.steps=0"
                )
        if has_no_weights(self.recipe.sharding):
            return  # it gets rank 0's
        # Copied into a model built as at the beginning: weights that stay in the memory of a file
        # are aligned by its header, which changes last digits of products with one row.
        folder = directory.base if self.recipe.lora.rank else directory.model
        folder = directory.adapter if has_adapters(model) else folder
        read_model(model, check_model_folder(folder, f"start a new run with `ludic train {directory.config} name=NAME`"))

    @property
    def title(self) -> str:
        return self.recipe.recipe

    @property
    def _is_measured_on_servers(self) -> bool:
        return self.recipe.evaluation.on == "servers" and self.recipe.steps > 0

    async def play_phases(self) -> None:
        if self.progress.phase == WARM_UP:
            await self._warm_up()
        if self.progress.phase == REINFORCE:
            self.adapt()  # held-out problems are answered by the model that is trained, rollouts by a merged copy
            if self.recipe.steps:
                await self._reinforce()
            if not self._is_measured_on_servers:
                self.progress.after = await self._evaluate() if self.recipe.steps else self.progress.before
            self._finish_phase(DONE)

    def conclude(self) -> str:
        recipe, progress = self.recipe, self.progress
        hashed = config_hash(recipe, schedule_steps=progress.schedule_steps)
        outcome = build_outcome(progress, self.directory, self.parts.task, recipe, config_hash=hashed)
        text = outcome.summary.write(self.directory)
        if outcome.rewards:
            draw_rewards(outcome, self.directory, f"{recipe.recipe}, {recipe.algorithm}, seed {recipe.seed}")
        show_report(self.screen.console, outcome, self.directory)
        return text

    async def _warm_up(self) -> None:
        recipe, parts = self.recipe, self.parts
        if steps := parts.warmup.steps:
            source = parts.warmup.make_source(recipe, parts.task, parts.tokenizer)
            self.screen.note(parts.warmup.describe())
            with self.open_logger(WARM_UP, keys=WARM_UP_KEYS, spark_key="loss", last_step=steps) as logger:
                trainer = self._make_phase_trainer(WARM_UP, make_sft(normalizer="tokens"), source, parts.warmup_cfg, logger)
                await self._train(trainer, steps, WARM_UP)
        elif recipe.warmup.steps:
            self.screen.note("No warm-up: the task has no demonstrations")
        if not self._is_measured_on_servers:
            self.progress.before = await self._evaluate()
        if recipe.lora.rank and not has_adapters(parts.model):
            ranks.ask_rank_0("saving the base", lambda: save_policy(parts.model, parts.tokenizer, self.directory.base))
        self._finish_phase(REINFORCE)

    async def _reinforce(self) -> None:
        recipe, parts = self.recipe, self.parts
        extra = recipe.info_seed.num_seeds + parts.algorithm.greedy_baseline
        sizes = sorted({part.recipe.rollout.group_size + extra for part in list_parts(recipe, parts.task)})
        each = f"{recipe.rollout.prompts} problems x {' or '.join(map(str, sizes))} answers"
        self.screen.note(f"Reinforcement with {recipe.algorithm}: {recipe.steps} steps of {each}")
        named = parts.task.sources if isinstance(parts.task, Mixture) else ()
        rewards = [f"train/{name}/{SAMPLED_REWARD}" for name in named]
        keys = [*REINFORCE_KEYS, *rewards, *(f"train/{name}" for name in logged_names(parts.task))]
        running = run_actors(recipe, self.directory.path, self.screen.note, self.stop, is_placed=self.is_placed)
        async with running as actors, self._open_sampler(actors) as sampler:
            with self.open_logger(REINFORCE, keys=keys, spark_key=SAMPLED_REWARD, last_step=recipe.steps) as logger:
                source = None if self.directory.is_follower else self._make_source(sampler, actors)
                if isinstance(source, ActorBatches):
                    sampler = source.follow(sampler)
                if self._is_measured_on_servers:
                    engine_of = partial(self._make_engine, sampler=sampler)
                    self._held_out = make_held_out(recipe, parts.task, engine_of, parts.model, self.directory)
                trainer = self._make_phase_trainer(REINFORCE, parts.algorithm, source, parts.trainer_cfg, logger, sampler)
                if source is not None:
                    source.limit(recipe.steps - trainer.current_step)
                if isinstance(source, ActorBatches):
                    source.begin(trainer.current_step)
                if self.progress.before is not None and not trainer.last_eval:
                    rates = Evaluation.from_dict(self.progress.before).rates()
                    trainer.last_eval = {"eval/step": 0.0, **{eval_key(name): rate for name, rate in rates.items()}}
                self.screen.show_rates(trainer.last_eval)
                try:
                    if sampler.remote:
                        await trainer.publish()
                    if source is not None and not actors and trainer.current_step == 0:
                        for part in list_parts(recipe, parts.task):
                            await self._try_agent(part, sampler)
                    if self._is_measured_on_servers and self.progress.before is None:
                        self.progress.before = await self._evaluate()
                        self.directory.write_progress(self.progress)
                    await self._train(trainer, recipe.steps, REINFORCE)
                    if self._is_measured_on_servers:
                        await trainer.publish()  # the best weights, if it was stopped early
                        self.progress.after = await self._evaluate()
                    if isinstance(source, ActorBatches):
                        await source.close_queue()
                finally:
                    if source is not None:
                        await source.aclose()
        await trainer.reload()  # the server has ended

    async def _try_agent(self, part: Source, sampler: Sampler) -> None:
        """Play an episode of the agent, if there is one, before the first step, and tell what was
        found. Raises ConfigError if it fails."""
        if part.task.agent is None:
            return
        requests = make_training_requests(part.task, part.recipe.rollout, seed=self.recipe.seed).list_problems(0)
        engine = self._make_engine(part, sampler=sampler)
        try:
            [rollout] = await engine.generate_rollouts(requests[:1], max_steps=1)
        except RolloutError as error:
            raise ConfigError(f"the agent failed in a first episode: {error}") from error
        self.screen.note(f"Agent: {describe_agent(rollout)}")

    @asynccontextmanager
    async def _open_sampler(self, processes: ActorProcesses | None) -> AsyncIterator[Sampler]:
        """The sampler of the recipe. With actors that sample themselves, weights are published to
        the run's folder, and the sampler in this process is only used to find causes of a
        mismatch."""
        recipe, parts, directory = self.recipe, self.parts, self.directory
        if uses_queue(recipe) and choose_kind(recipe.inference) == "local":
            versions = PolicyVersions(directory.policy)
            yield Sampler(self._client, versions, recipe.model or "small", remote=True)
            return
        async with open_sampler(
            recipe,
            parts.model,
            parts.tokenizer,
            directory.model,
            log=directory.server_log,
            note=self.screen.note,
            timer=self.timer,
            is_follower=directory.is_follower,
            is_stopped=lambda: bool(self.stop),
            find_end=lambda: None if processes is None else processes.why_lost(),
        ) as sampler:
            yield sampler

    def _note_preflight(self, report: PreflightReport) -> None:
        """Record the comparison of trainer and sampler before the first step is taken; a resumed
        run keeps the first one."""
        if self.progress.preflight is None:
            self.progress.preflight = report.to_dict()
            self.directory.write_progress(self.progress)

    def _make_source(self, sampler: Sampler, actors: ActorProcesses | None) -> BatchSourceBase:
        algorithm, task = self.parts.algorithm, self.parts.task
        credit, turns = algorithm.credit_assigner, task.max_turns
        if uses_queue(self.recipe):
            checkpoints = self.directory.checkpoints / REINFORCE
            return ActorBatches(self.recipe, self.directory, checkpoints, credit, self.stop, actors)
        info_seed, curriculum = build_info_seed(self.recipe.info_seed), build_curriculum(self.recipe, task)
        settings: Any = {"seed": self.recipe.seed, "info_seed": info_seed, "greedy": algorithm.greedy_baseline}
        if curriculum is None:
            requests = make_training_requests(task, self.recipe.rollout, **settings)
        else:
            requests = CurriculumRequests(task, task.problem_list, self.recipe.rollout, policy=curriculum, **settings)
        engine = self._make_engine(trained=True, sampler=sampler)
        if uses_pool(self.recipe):
            self.screen.note(describe_over_sampling(self.recipe))
            return OverSampledRollouts(self.recipe, engine, requests, credit, max_steps=turns, directory=self.directory)
        source = PlayedBatches(self.recipe.rollout, engine, requests, credit, max_steps=turns, directory=self.directory)
        ahead = self.recipe.inference.batches_ahead
        return OverlappedSource(source, max_lag=ahead) if ahead else source

    def _make_phase_trainer(
        self,
        phase: str,
        algorithm: RLAlgorithm,
        source: Any,
        cfg: TrainerConfig,
        logger: TrainingLogger | None,
        sampler: Sampler | None = None,
    ) -> Trainer:
        """The trainer of a phase, at its last checkpoint if there is one."""
        preflight = None if sampler is None else make_preflight(self.recipe, self.parts.task, self.parts.tokenizer, sampler)
        if preflight is not None:
            preflight.on_report = self._note_preflight
        trainer = self.make_trainer(
            phase,
            Trainer,
            source,
            self.directory.checkpoints / phase,
            algo=algorithm,
            publisher=None if sampler is None or not (cfg.sync_every_steps or sampler.remote) else sampler.publisher,
            cfg=choose_precision(cfg, self.recipe.sharding),
            evaluator=self.evaluator(self._held_out),
            reducers={**default_reducers(), **(run_reducers(self.parts.task) if phase == REINFORCE else {})},
            total_training_steps=self.parts.warmup.steps if phase == WARM_UP else self.recipe.steps,
            preflight=preflight,
            critic=open_critic(self.recipe, algorithm, self.parts.model),
            **open_control(self.recipe, algorithm, self.parts, self.directory, phase, cfg, logger),
        )
        self._held_out.current_step = lambda: trainer.current_step if phase == REINFORCE else 0
        return trainer

    async def _train(self, trainer: Trainer, steps: int, phase: str) -> None:
        """Take the steps that are left, or those until a stop.

        A checkpoint is saved after a stop, and at the end of the reinforcement, before the trained
        policy replaces the one that the reinforcement began with.
        """
        with self.timer.phase(phase):
            await self.take_steps(trainer, steps)
            is_stopped = self.is_stopped()
            if is_stopped or phase == REINFORCE:
                await trainer.ensure_checkpoint(patience_s=STOP_PATIENCE_S)
            if not is_stopped:
                restore_best_weights(trainer, self.progress, note=self.screen.note)
            self.end_training()
        if phase == REINFORCE:
            self.progress.steps = trainer.current_step
            self.directory.write_progress(self.progress)
        self._raise_if_stopped()

    async def _evaluate(self) -> dict[str, Any]:
        return await self.measure_on_rank_0("the held-out measurement", self._measure)

    async def _measure(self) -> dict[str, Any]:
        self.screen.note(f"Measuring on {self._held_out.describe()}")
        measured = await self._held_out.measure()
        rates = ", ".join(f"{name.replace('_', ' ')} {rate:.3f}" for name, rate in measured.rates().items())
        self.screen.note(f"  {rates}")
        if measured.failed:
            self.screen.note(f"  {measured.failed} answers failed or could not be graded, and are in no rate")
        return asdict(measured)

    def _make_engine(self, part: Source | None = None, *, trained: bool = False, sampler: Sampler | None = None) -> RolloutEngine:
        """The engine of the run's task, or of one of its environments."""
        recipe, task = (self.recipe, self.parts.task) if part is None else (part.recipe, part.task)
        return make_engine(
            task,
            self._client if sampler is None else sampler.client,
            model_name=self.recipe.model or "small" if sampler is None else sampler.model_name,
            system_prompt=recipe.rollout.system_prompt,
            failures_path=self.directory.failed_episodes if trained else None,
            trained=trained,
            info_seed=build_info_seed(self.recipe.info_seed),
        )

    def _finish_phase(self, following: str) -> None:
        """Save the policy, and write that `following` is next."""
        self.save_model()
        self.end_phase(following)
        self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        if self.progress.phase != DONE and self.is_stopped():
            self.save_model()
            self.interrupt()
