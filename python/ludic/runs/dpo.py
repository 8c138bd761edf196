"""Direct preference optimization: read the pairs, warm the policy up, fix the reference if the loss
has one, train, measure with `DPOTrainer` and by sampled answers, report. Each closing sentence of
the report is printed only if the numbers support it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from ludic.errors import CheckpointError, ConfigError
from ludic.eval.statistics import Interval, mean_interval, share_interval, wilson_interval
from ludic.files.checkpoints import check_model_folder
from ludic.files.jsonl import read_jsonl, write_jsonl
from ludic.inference.local import LocalChatClient
from ludic.inference.request import SamplingParams
from ludic.models.saving import save_policy
from ludic.models.state_files import holds_whole_weights, read_model
from ludic.recipes.build import build_config, check_callbacks
from ludic.recipes.epochs_schema import DPORecipe
from ludic.recipes.model import (
    add_adapters,
    build_model,
    build_tokenizer,
    check_adapters,
    check_vocabulary,
    has_no_weights,
    is_shared_out,
    quantize_base,
)
from ludic.runs.control import load_frozen
from ludic.runs.data.pairs import PairData
from ludic.runs.directory import DONE, DPODirectory
from ludic.runs.epochs import PairsParts, PairsRun, check_heldout, count_steps, describe_data
from ludic.runs.loggers import Screen
from ludic.runs.report.summary import make_table
from ludic.runs.shared_model import choose_precision, place_model, prepare_sharding
from ludic.training import ranks
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.source import STOP_PATIENCE_S
from ludic.training.dpo_trainer import DPOTrainer, DPOTrainerConfig
from ludic.training.evaluators.held_out import MEASURED
from ludic.training.loss.dpo import REFERENCE_FREE
from ludic.training.presets import make_dpo, make_kto, make_sft
from ludic.training.rng import seed_everything
from ludic.training.trainer import Trainer
from ludic.training.types import SAWItem
from ludic.types import ImageSpan

WARM_UP, DPO = "warm_up", "dpo"
WARM_UP_KEYS = ["train/loss", "train/grad_norm"]
KEYS = ["train/loss", "train/rewards/accuracies", "train/rewards/margins", "train/grad_norm"]
ACCURACY = "rewards/accuracies"
SHOWN_ANSWERS, SHOWN_CHARACTERS = 4, 60
RATES = {"score": "true quality", "well_formed": "well-formed", "finished": "ended"}


class DPORun(PairsRun[DPORecipe, DPODirectory]):
    """Warm-up, sampled answers, training on pairs, metrics on held-out pairs, and answers again.
    Its summary.json has the `eval_` metrics and `after` once the run is finished, the `eval_`
    metrics only if pairs are held out."""

    accuracy = heldout_accuracy = ACCURACY
    margins = "the differences of the implicit rewards of the held-out pairs"

    def __init__(self, recipe: DPORecipe, parts: PairsParts, directory: DPODirectory, screen: Screen) -> None:
        super().__init__(recipe, parts, directory, screen)
        self.method = f"{recipe.loss.loss_type} loss, beta {recipe.loss.beta:g}"
        self._warmed_up = directory.base if recipe.lora.rank else directory.reference
        """The policy that DPO begins with, if there is a warm-up: what adapters adapt, or else the
        reference."""
        if not recipe.warmup.steps or self.progress.phase == WARM_UP:
            return
        again = f"start a new run with `ludic dpo {directory.config} name=NAME`"
        if self._warmed_up.is_dir():
            check_model_folder(self._warmed_up, again)
        if not holds_whole_weights(self._warmed_up):
            raise CheckpointError(f"{self._warmed_up}, the policy after the warm-up, is gone; {again}")
        if not has_no_weights(recipe.sharding):
            read_model(parts.model, self._warmed_up)

    @classmethod
    def build(cls, recipe: DPORecipe, note: Callable[[str], None]) -> PairsParts:
        prepare_sharding(recipe.sharding, recipe.trainer.model_device)
        seed_everything(recipe.seed)
        check_adapters(recipe)
        tokenizer = build_tokenizer(recipe)
        algorithm = make_algorithm(recipe)
        cfg = build_config(DPOTrainerConfig, recipe.trainer, pad_token_id=tokenizer.pad_token_id, seed=recipe.seed)
        cfg = choose_precision(cfg, recipe.sharding)
        check_callbacks(recipe.callbacks, cfg, measured=MEASURED)
        reference = recipe.reference.model
        if reference is not None:
            check_vocabulary("reference.model", reference, tokenizer)
        model = build_model(recipe, tokenizer)
        data = PairData.read(recipe, tokenizer, note=note, unpaired=recipe.loss.loss_type == "kto")
        check_heldout(data.heldout, cfg)
        device = "cpu" if is_shared_out(recipe.sharding) else cfg.model_device
        if not recipe.warmup.steps:
            model = quantize_base(model, recipe, device)
        model = place_model(model, recipe.sharding, device)
        if not recipe.warmup.steps:
            model = add_adapters(model, recipe, seed=recipe.seed)
        return PairsParts(model, tokenizer, cfg, count_steps(data, recipe), data, algorithm)

    async def play_phases(self) -> None:
        ranks.ask_rank_0("writing the pairs", self.write_pairs)
        if self.progress.phase == WARM_UP:
            if self.recipe.warmup.steps:
                await self._warm_up()
            self.progress.before = await self.measure_on_rank_0("the answers", lambda: self._answer("before"))
            self.end_phase(DPO)
        self.adapt()
        keys = [key for key in KEYS if self.recipe.loss.loss_type != "kto" or not key.endswith("margins")]
        trainer = await self.train_on_pairs(self._make_dpo_trainer, f"{self.method}, on", keys)
        measured = self.measure_heldout(trainer, "Held-out accuracy of the implicit rewards")
        self.progress.after = {**measured, **await self.measure_on_rank_0("the answers", lambda: self._answer("after"))}
        self.end_phase(DONE)

    @property
    def adapted_base(self) -> str | None:
        """With a warm-up, the adapters adapt what it trained."""
        return None if self.recipe.warmup.steps else super().adapted_base

    async def _warm_up(self) -> None:
        recipe, parts, section = self.recipe, self.parts, self.recipe.warmup
        items = [item for item in parts.data.train if section.answers == "both" or item.meta["role"] == "chosen"]
        source = ItemBatchSource(items, batch_size=section.batch_size, seed=recipe.seed, name="warmup")
        source.unshard()  # all ranks share its batches
        self.screen.note(f"Warm-up: {section.steps} steps on {len(items):,} answers of the pairs ({section.answers})")
        cfg = replace(parts.cfg, lr=section.lr, eval_every_n_steps=None, eval_at_start=False, early_stopping_patience=None)
        with (
            self.open_logger(WARM_UP, keys=WARM_UP_KEYS, spark_key="loss", last_step=section.steps) as logger,
            self.timer.phase(WARM_UP),
        ):
            trainer = self.make_trainer(
                WARM_UP,
                Trainer,
                source,
                self.directory.checkpoints / WARM_UP,
                algo=make_sft(normalizer="tokens"),
                cfg=cfg,
                train_logger=logger,
                total_training_steps=section.steps,
            )
            is_done = await self.take_steps(trainer, section.steps)
            if not is_done:
                await trainer.ensure_checkpoint(patience_s=STOP_PATIENCE_S)
            self.end_training()
        if not is_done:
            self.interrupt()
        ranks.ask_rank_0("saving the warmed-up policy", lambda: save_policy(parts.model, parts.tokenizer, self._warmed_up))

    def _make_dpo_trainer(self, **options: Any) -> DPOTrainer:
        """The model of `reference.model` is loaded here, unless its log-probabilities are there
        already: nothing holds it once it has scored the pairs."""
        source, file = self.recipe.reference.model, self.directory.reference_logps
        needs_scores = source is not None and not ranks.ask_rank_0("looking for the reference log-probabilities", file.is_file)
        return DPOTrainer(
            algo=self.parts.algorithm,
            pairs=self.parts.data.train,
            eval_items=self.parts.data.heldout or None,
            reference=load_frozen(str(source), self.recipe, self.parts.cfg, dtype=self.recipe.dtype) if needs_scores else None,
            reference_file=file if self.parts.algorithm.reads_reference else None,
            **options,
        )

    async def _answer(self, when: str) -> dict[str, Any]:
        """The rates of the policy's answers, which are also written."""
        recipe, parts = self.recipe, self.parts
        answers = await sample_answers(
            parts.model,
            parts.tokenizer,
            parts.data.heldout,
            parts.data.task,
            count=recipe.answers,
            max_new_tokens=recipe.max_new_tokens,
            seed=recipe.seed,
        )
        earlier = read_answers(self.directory.answers, before=when)
        write_jsonl(self.directory.answers, [*earlier, *({"when": when, **asdict(answer)} for answer in answers.sampled)])
        return answers.to_dict()

    def list_facts(self) -> dict[str, Any]:
        loss, after = self.recipe.loss, self.progress.after or {}
        return {
            "loss_type": loss.loss_type,
            "beta": loss.beta,
            **{key: value for key, value in after.items() if key.startswith("eval_")},
            "before": self.progress.before,
            "after": {key: value for key, value in after.items() if not key.startswith("eval_")} or None,
            **super().list_facts(),
        }

    def show(self, summary: Mapping[str, Any]) -> None:
        console, data = self.screen.console, summary["data"]
        if "eval_loss" in summary:
            title = f"{summary['eval_num_pairs']:,.0f} held-out pairs, by implicit rewards"
            table = make_table(title, ("", "after"), right=("after",))
            for name in (ACCURACY, "rewards/margins", "rewards/chosen", "rewards/rejected", "loss", "ece"):
                table.add_row(name, f"{summary[f'eval_{name}']:.4f}")
            console.print(table)
        self.show_best_accuracy(summary)
        if (summary["before"] or {}).get("answers") and summary["after"]:
            console.print(_make_rates_table(summary["before"], summary["after"]))
        rows = read_answers(self.directory.answers, before="end")
        if rows:
            console.print(_make_answers_table(rows))
        left_out = f"{sum(data['left_out'].values()):,} rows make no pair"
        console.print(f"{describe_data(data)}; {left_out}")
        self.show_pair_costs(summary)
        console.print(f"[bold]What this shows[/]: {describe_results(summary)}")

    def list_files(self) -> tuple[dict[Path, str], dict[Path, str]]:
        pictures, rows = super().list_files()
        return pictures, {
            **rows,
            self.directory.answers: "sampled answers, before and after",
            self.directory.reference_logps: "log-probabilities of the reference, for a resume",
            self.directory.reference: "the policy after the warm-up, which is the reference of a loss that has one",
        }


def make_algorithm(recipe: DPORecipe) -> RLAlgorithm:
    """The algorithm of `loss`. Raises ConfigError for a setting that this loss does not have, and
    for a reference that it does not read."""
    given: dict[str, Any] = {name: value for name, value in vars(recipe.loss).items() if value is not None}
    kto = given["loss_type"] == "kto"
    loss, make = (given.pop("loss_type"), make_kto) if kto else (given["loss_type"], make_dpo)
    for name in given.keys() - signature(make).parameters.keys():
        raise ConfigError(f"loss.{name} ({given[name]}) is no setting of loss={loss}; leave it out")
    algorithm: RLAlgorithm = make(**given)
    if recipe.reference.model is not None and not algorithm.reads_reference:
        raise ConfigError(f"reference.model ({recipe.reference.model}) is never read by loss={loss}; leave it out")
    return algorithm


def _make_rates_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> Any:
    times = ("before", "after")
    table = make_table(f"{after['answers']:,} sampled answers; 95 % intervals", ("", *times), right=times)
    for key, name in RATES.items():
        if key in before and key in after:
            table.add_row(name, _format_rate(before[key]), _format_rate(after[key]))
    return table


def _format_rate(rate: Mapping[str, float | None] | None) -> str:
    if rate is None:
        return "none"
    if rate["low"] is None or rate["high"] is None:
        return f"{rate['mean']:.3f}"
    return f"{rate['mean']:.3f} ({rate['low']:.3f} to {rate['high']:.3f})"


def _make_answers_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    columns = ["prompt", *dict.fromkeys(row["when"] for row in rows)]
    table = make_table("Sampled answers", columns)
    by_time = [[row for row in rows if row["when"] == when] for when in columns[1:]]
    for same in list(zip(*by_time, strict=False))[:SHOWN_ANSWERS]:
        table.add_row(Text(_shorten(same[0]["prompt"], end=True)), *(Text(_shorten(row["text"])) for row in same))
    return table


def _shorten(text: str, *, end: bool = False) -> str:
    """One line of at most `SHOWN_CHARACTERS`; of a prompt, its end."""
    line = " ".join(text.split())
    if len(line) <= SHOWN_CHARACTERS:
        return line
    return f"…{line[-SHOWN_CHARACTERS:]}" if end else f"{line[:SHOWN_CHARACTERS]}…"


DESCRIBED_RATES = {"score": "true quality of sampled answers", "well_formed": "share of well-formed answers"}


def describe_results(summary: Mapping[str, Any]) -> str:
    """The sentences on one line, from the content of summary.json."""
    return " ".join(_write_sentences(summary))


def _write_sentences(summary: Mapping[str, Any]) -> Iterator[str]:
    if summary["status"] != "finished":
        yield "The run was stopped before its end was measured."
        return
    if not summary["steps"]:
        yield "Nothing was trained."
        return
    if f"eval_{ACCURACY}" in summary:
        yield from _describe_pairs(summary)
    else:
        yield "No pairs are held out, so nothing here measures what was learned; raise heldout, or give heldout_data."
    before, after = summary["before"] or {}, summary["after"] or {}
    known = [name for name in DESCRIBED_RATES if before.get(name) and after.get(name)]
    for name in known:
        yield _describe_change(DESCRIBED_RATES[name], before[name], after[name])
    if not known:
        yield "Nothing here measures whether sampled answers are better."


def _describe_pairs(summary: Mapping[str, Any]) -> Iterator[str]:
    """A policy that is its reference has the margin 0 on every pair, and no accuracy."""
    share, pairs = summary[f"eval_{ACCURACY}"], summary["eval_num_pairs"]
    low, high = wilson_interval(share * pairs, pairs)
    against = (
        "more often than not"
        if low > 0.5
        else "less often than not"
        if high < 0.5
        else "which this number of pairs does not tell from chance"
    )
    best = summary.get("bayes_accuracy")
    bound = "" if best is None else f"; {best:.1%} is the best possible on average"
    has_reference = summary.get("loss_type") not in REFERENCE_FREE
    what = "moved towards the chosen response" if has_reference else "gives the chosen response the higher reward"
    yield (
        f"The policy {what} in {share:.1%} of {pairs:,.0f} held-out pairs, {against} (95 % interval "
        f"{low:.1%} to {high:.1%}{bound})."
    )
    chosen, rejected = summary["eval_rewards/chosen"], summary["eval_rewards/rejected"]
    if has_reference and rejected < chosen < 0:
        yield (
            "Chosen responses became less likely than under the reference, and rejected ones even less: the margin comes from the "
            "rejected responses. loss.nll_coeff above 0 raises chosen responses too."
        )


def _describe_change(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The intervals of two independent samples; what they overlap in may be noise."""
    by = f"from {before['mean']:.3f} to {after['mean']:.3f}"
    bounds = (before["low"], before["high"], after["low"], after["high"])
    if any(bound is None for bound in bounds):
        return f"The {name} went {by}; how much of it is noise is not known."
    if after["low"] > before["high"] or after["high"] < before["low"]:
        return f"The {name} {'rose' if after['mean'] > before['mean'] else 'fell'} {by}; their 95 % intervals do not meet."
    if after["mean"] == before["mean"]:
        return f"The {name} did not change: {after['mean']:.3f}."
    return f"The {name} went {by}, which may be noise: their 95 % intervals overlap."


TIMES = ("before", "after", "end")


@dataclass(frozen=True)
class Answer:
    """One sampled answer."""

    prompt: str
    text: str
    is_finished: bool
    """Whether the model ended it, within the token limit."""
    score: float | None = None
    """The quality by the generator of the pairs; None if it is no answer of the task, or if nothing
    judges it."""


@dataclass(frozen=True)
class Answers:
    """What a policy answers."""

    sampled: Sequence[Answer] = field(default_factory=list)
    is_judged: bool = False
    """Whether the true quality of an answer is known."""

    def to_dict(self) -> dict[str, Any]:
        """For summary.json: `score`, the mean quality of well-formed answers, `well_formed`, their
        share, and `finished`, the share of ended answers, each with a 95 % interval."""
        if not self.sampled:
            return {"answers": 0}
        rates: dict[str, Any] = {"finished": _share([answer.is_finished for answer in self.sampled])}
        if self.is_judged:
            scores = [answer.score for answer in self.sampled if answer.score is not None]
            rates["well_formed"] = _share([answer.score is not None for answer in self.sampled])
            rates["score"] = _describe_interval(mean_interval(scores)) if scores else None
        return {"answers": len(self.sampled), **rates}


async def sample_answers(
    model: Any, tokenizer: Any, heldout: Sequence[SAWItem], task: Any, *, count: int, max_new_tokens: int, seed: int
) -> Answers:
    """`count` answers to the prompts of held-out pairs, one prompt after another, at temperature 1.
    The prompts are the tokens that were trained on. If the `task` has
    `judge(prompt, response)`, it gives the quality; None if the response is no answer."""
    prompts = list_prompts(heldout)
    if not prompts or not count:
        return Answers()
    client = LocalChatClient(model, tokenizer, max_batch_size=256)
    sampling = SamplingParams(temperature=1.0, max_tokens=max_new_tokens)
    asked = [prompts[index % len(prompts)] for index in range(count)]
    traces = await asyncio.gather(
        *(
            client.complete_tokens(prompt, sampling=sampling, seed=seed + index, images=images)
            for index, (prompt, images) in enumerate(asked)
        )
    )
    judge = getattr(task, "judge", None)
    answers = []
    for (prompt, _), trace in zip(asked, traces, strict=True):
        question, text = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, trace.completion_token_ids))
        ended = trace.finish_reason == "stop"
        answers.append(Answer(question, text, ended, judge(question, text) if judge is not None and ended else None))
    return Answers(answers, judge is not None)


def read_answers(path: Path, *, before: str) -> list[dict[str, Any]]:
    """The rows of answers.jsonl of the times before that one."""
    rows = [row for _, row in read_jsonl(path)] if path.is_file() else []
    return [row for row in rows if TIMES.index(row["when"]) < TIMES.index(before)]


def list_prompts(items: Sequence[SAWItem]) -> list[tuple[list[int], tuple[ImageSpan, ...]]]:
    """The distinct prompts of the samples, in order of first appearance: the tokens and images
    before the first action. Example: ids [5, 6, 7] and [5, 6, 8] with masks [0, 0, 1] have the one
    prompt [5, 6]."""
    prompts: dict[tuple[tuple[int, ...], tuple[ImageSpan, ...]], None] = {}
    for item in items:
        start = int(np.flatnonzero(np.asarray(item.action_mask))[0]) if np.any(item.action_mask) else 0
        if start:
            images = tuple(span for span in item.images if span.start < start)
            prompts.setdefault((tuple(int(token) for token in item.input_ids[:start]), images))
    return [(list(prompt), images) for prompt, images in prompts]


def _share(hits: Sequence[bool]) -> Mapping[str, float | None]:
    return _describe_interval(share_interval([float(hit) for hit in hits]))


def _describe_interval(interval: Interval) -> dict[str, float | None]:
    return {"mean": interval.value, "low": interval.low, "high": interval.high}
