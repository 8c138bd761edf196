"""Reinforcement learning with a reward model from a folder. It rewards training; held-out
evaluation keeps the task's own reward."""

import asyncio
import json
import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_models import reward_model, score_alone
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.errors import ConfigError
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.recipes.build import build_task
from ludic.recipes.compose import compose
from ludic.recipes.schema import TaskSection
from ludic.runs.rollouts import make_training_requests
from ludic.tasks import DigitSort, EpisodicTask, as_episodic
from ludic.tasks.judged import JudgedTask, judged_by, load_reward_model

UNPUNISHED = "+reward_model_args.unfinished_penalty=0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A reward model as `ludic train-rm` saves it, in the folder `model` of a run."""
    place = tmp_path / "rm" / "model"
    reward_model(seed=8).save_pretrained(place)
    make_byte_tokenizer().save_pretrained(place)
    return tmp_path / "rm"


def train(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", *arguments])


def lines(run: Path, phase: str = "reinforce") -> list[dict[str, float]]:
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in read if line["phase"] == phase]


def test_training_uses_the_score_and_held_out_evaluation_the_tasks_reward(tiny: list[str], tmp_path: Path, folder: Path) -> None:
    result = train("sort", *tiny, f"reward_model={folder}", "steps=2", "rollout.log_every=1")
    assert result.exit_code == 0, result.output
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 16
    for rollout in rollouts:
        [step] = rollout["steps"]
        ids = [*step["trace"]["prompt_token_ids"], *step["trace"]["completion_token_ids"]]
        assert rollout["meta"]["rm_score_from"] == "tokens"
        penalty = 10.0 if step["trace"]["finish_reason"] == "length" else 0.0
        assert step["reward"] == pytest.approx(score_alone(reward_model(seed=8), ids) - penalty, abs=1e-4)
        assert step["info"]["rewards/task"] in (0.0, 1.0)
    for line in lines(tmp_path / "run"):
        assert line["train/avg_total_reward"] <= line["train/rewards/reward_model"] + 1e-6
        assert 0 <= line["train/rewards/task"] <= 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary["after"]) == {"sampled_reward", "greedy_accuracy", "rewards/reward_model"}
    assert 0 <= summary["after"]["sampled_reward"] <= 1
    said = " ".join(result.stdout.split())
    assert "the score of" in said
    assert "The held-out score of the reward model" in said


def test_the_tasks_reward_can_be_added_to_the_score(tiny: list[str], tmp_path: Path, folder: Path) -> None:
    half = ["+reward_model_args.mode=bonus", "+reward_model_args.rm_coeff=0.5", UNPUNISHED]
    result = train("sort", *tiny, f"reward_model={folder}", "steps=1", *half)
    assert result.exit_code == 0, result.output
    [line] = lines(tmp_path / "run")
    expected = line["train/rewards/task"] + 0.5 * line["train/rewards/reward_model"]
    assert line["train/avg_total_reward"] == pytest.approx(expected, abs=1e-6)


def test_a_run_with_a_reward_model_is_reproducible(tiny: list[str], tmp_path: Path, folder: Path) -> None:
    seen = []
    for name in ("one", "two"):
        assert train("sort", *tiny, f"reward_model={folder}", "steps=2", f"name={name}").exit_code == 0
        seen.append([{k: v for k, v in line.items() if not k.startswith(("perf/", "time"))} for line in lines(tmp_path / name)])
    keys = [key for key in seen[0][0] if "_s" not in key and "second" not in key]
    assert [[line[key] for key in keys] for line in seen[0]] == [[line[key] for key in keys] for line in seen[1]]


def test_a_reward_model_needs_only_prompts(tiny: list[str], tmp_path: Path, folder: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "completion": f"{n + 1}"}) + "\n" for n in range(30)))
    short = ["warmup.steps=2", "steps=1", "rollout.max_new_tokens=4"]
    result = train(*tiny, f"data={data}", f"reward_model={folder}", UNPUNISHED, *short)
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["after"]["sampled_reward"] == pytest.approx(summary["after"]["rewards/reward_model"], abs=1e-6)


def test_a_score_alone_gives_no_accuracy_in_the_run_and_in_its_evaluation(tiny: list[str], tmp_path: Path, folder: Path) -> None:
    """Regression test: the run used to count scores above 1 as right answers, and an evaluation of
    the same model had accuracy 0."""
    data = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"{n}+1=", "completion": f"{n + 1}", "answer": f"{n + 1}"} for n in range(30)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = ["warmup.steps=2", "steps=1", "rollout.max_new_tokens=4"]
    result = train(*tiny, f"data={data}", f"reward_model={folder}", *few)
    assert result.exit_code == 0, result.output
    assert not set("✓✗") & set(result.output)
    assert "right answer" not in result.output
    assert "reference" in result.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["solved_at"] is None
    assert set(summary["after"]) == {"sampled_reward", "greedy_reward", "rewards/reward_model"}
    assert "train/rewards/task" not in lines(tmp_path / "run")[0]

    evaluated = CliRunner().invoke(app, ["eval", str(tmp_path / "run"), "temperature=0", "--json"])
    assert evaluated.exit_code == 0, evaluated.output
    found = json.loads(evaluated.stdout)
    assert (found["accuracy"], found["accuracy_bounds"], found["pass_at_k"], found["solved_at"]) == (None, None, {}, None)
    assert found["reward"]["value"] == pytest.approx(summary["after"]["greedy_reward"], abs=1e-4)
    assert found["reward_model"] == str(folder)
    assert "the score of" in " ".join(evaluated.stderr.split())
    assert re.search("No accuracy: .*eval_reward=", " ".join(evaluated.stderr.split()))


def test_a_score_cannot_be_called_right_and_a_reward_of_the_task_can(tiny: list[str], tmp_path: Path, folder: Path) -> None:
    """Regression test: `solved_at` used to mark answers as right by their score."""
    data = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"{n}+1=", "answer": f"#### {n + 1}", "completion": f"{n + 1}"} for n in range(30)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = [f"data={data}", "warmup.steps=1", "steps=1", "rollout.max_new_tokens=4", "evaluation.solved_at=0.5"]
    refusal = train(*tiny, *few, "reward_model=nowhere")
    assert refusal.exit_code == 2
    said = " ".join(refusal.stderr.split())
    assert "solved_at (0.5) cannot be used with a reward model" in said
    assert "eval_reward=MODULE:FUNCTION" in said
    judged = train(*tiny, *few, f"reward_model={folder}", "eval_reward=gsm8k")
    assert judged.exit_code == 0, judged.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["solved_at"] == 0.5
    assert summary["after"]["greedy_accuracy"] == 0.0


def test_an_evaluation_also_measures_a_score_beside_the_tasks_reward(tiny: list[str], tmp_path: Path, folder: Path) -> None:
    assert train("sort", *tiny, f"reward_model={folder}", "steps=0").exit_code == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    evaluated = CliRunner().invoke(app, ["eval", str(tmp_path / "run"), "temperature=0", "--json"])
    found = json.loads(evaluated.stdout)
    assert found["accuracy"]["value"] == pytest.approx(summary["after"]["greedy_accuracy"])
    assert "rewards/reward_model" in found["also"]


def test_an_evaluation_of_a_server_refuses_to_score_with_a_reward_model(folder: Path) -> None:
    given = ["eval", "sort", f"reward_model={folder}", "base_url=http://127.0.0.1:9/v1"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert "needs a model in this process" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data=prompts.jsonl"], "reward"),
        (["sort", "+reward_model_args.mode=add"], "reward_model_args ({'mode': 'add'}) needs reward_model"),
        (["sort", "reward_model=FOLDER", "+reward_model_args.mod=add"], "did you mean mode"),
        (["sort", "reward_model=FOLDER", "+reward_model_args.mode=mean"], "mode ('mean') must be one of replace"),
        (["sort", "reward_model=./nothing-here"], "give a folder with config.json"),
    ],
)
def test_incompatible_settings_are_refused_before_anything_is_written(
    tiny: list[str], tmp_path: Path, folder: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    given = [a.replace("FOLDER", str(folder)).replace("prompts", f"{tmp_path}/prompts") for a in arguments]
    result = train(*given[:1], *tiny, *given[1:]) if given[0] == "sort" else train(*tiny, *given)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "run").exists()


def test_a_policy_is_refused_as_a_reward_model(tmp_path: Path) -> None:
    from playing import tiny_model

    tiny_model().save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"a Qwen2ForCausalLM\) has no weights for score\.weight"):
        load_reward_model(str(tmp_path))


def test_a_classifier_with_several_labels_is_refused_as_a_reward_model(tmp_path: Path) -> None:
    reward_model(labels=3).save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="3 labels"):
        load_reward_model(str(tmp_path))


# ---- adapters
# ------------------------------------------------------------------------------------------


def save_adapters(folder: Path, base: Any, task: str | None, *, named: Path | None = None, **settings: Any) -> Any:
    """Save `base` to `folder/base` and non-zero adapters of it to `folder/adapters`. Returns the
    adapted model."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    base.save_pretrained(folder / "base")
    make_byte_tokenizer().save_pretrained(folder / "base")
    config = LoraConfig(task_type=task, target_modules=["q_proj"], init_lora_weights=False, **settings)
    adapted = get_peft_model(deepcopy(base), config).eval()
    if "modules_to_save" in settings:
        adapted.base_model.model.score.modules_to_save["default"].weight.data.neg_()
    adapted.peft_config["default"].base_model_name_or_path = str(named or folder / "base")
    adapted.save_pretrained(folder / "adapters")
    return adapted


def assert_scores_as(client: Any, adapted: Any, base: Any) -> None:
    with torch.no_grad():
        expected = adapted(input_ids=torch.tensor([[53, 46, 53]])).logits.item()
    assert asyncio.run(client.score_batch([[53, 46, 53]], normalize=False)) == pytest.approx([expected], abs=1e-4)
    assert abs(expected - score_alone(base, [53, 46, 53])) > 1e-3


def test_adapters_are_merged_into_their_base_model(tmp_path: Path) -> None:
    base = reward_model(seed=9)
    adapted = save_adapters(tmp_path, base, "SEQ_CLS", modules_to_save=["score"])
    assert_scores_as(load_reward_model(str(tmp_path / "adapters")), adapted, base)


def test_adapters_without_a_head_use_that_of_their_base_model(tmp_path: Path) -> None:
    base = reward_model(seed=9)
    adapted = save_adapters(tmp_path, base, None)
    assert_scores_as(load_reward_model(str(tmp_path / "adapters")), adapted, base)


def test_adapters_with_a_head_can_have_a_base_model_without_one(tmp_path: Path) -> None:
    base = reward_model(seed=9)
    make_policy(base).save_pretrained(tmp_path / "policy")
    make_byte_tokenizer().save_pretrained(tmp_path / "policy")
    adapted = save_adapters(tmp_path, base, "SEQ_CLS", modules_to_save=["score"], named=tmp_path / "policy")
    assert_scores_as(load_reward_model(str(tmp_path / "adapters")), adapted, base)


def make_policy(base: Any) -> Any:
    """A language model with the hidden layers of `base`."""
    from transformers import Qwen2ForCausalLM

    made = Qwen2ForCausalLM(base.config)
    made.model.load_state_dict(base.model.state_dict())
    return made


def test_adapters_of_a_language_model_are_refused_as_a_reward_model(tmp_path: Path) -> None:
    save_adapters(tmp_path, make_policy(reward_model(seed=9)), "CAUSAL_LM")
    said = r"holds adapters of a language model \(CAUSAL_LM\).*name a reward model, such as the folder of a `ludic train-rm` run"
    with pytest.raises(ConfigError, match=said):
        load_reward_model(str(tmp_path / "adapters"))


def test_adapters_of_a_language_model_are_refused_on_a_reward_model(tmp_path: Path) -> None:
    reward_model(seed=9).save_pretrained(tmp_path / "rm")
    make_byte_tokenizer().save_pretrained(tmp_path / "rm")
    save_adapters(tmp_path, make_policy(reward_model(seed=9)), "CAUSAL_LM", named=tmp_path / "rm")
    with pytest.raises(ConfigError, match=r"holds adapters of a language model \(CAUSAL_LM\)"):
        load_reward_model(str(tmp_path / "adapters"))


def test_adapters_and_base_model_without_a_head_are_refused_as_a_reward_model(tmp_path: Path) -> None:
    """Only the missing heads show that these adapters are not a reward model's."""
    save_adapters(tmp_path, make_policy(reward_model(seed=9)), None)
    with pytest.raises(ConfigError, match=r"its base \(.*base.*\) lack weights score\.weight"):
        load_reward_model(str(tmp_path / "adapters"))


def test_adapters_that_do_not_match_their_model_are_a_user_error(tmp_path: Path) -> None:
    reward_model(seed=9, hidden_size=32).save_pretrained(tmp_path / "other")
    make_byte_tokenizer().save_pretrained(tmp_path / "other")
    save_adapters(tmp_path, reward_model(seed=9), "SEQ_CLS", modules_to_save=["score"], named=tmp_path / "other")
    with pytest.raises(ConfigError, match=r"do not fit .*other.*size mismatch"):
        load_reward_model(str(tmp_path / "adapters"))


def test_a_run_with_adapters_of_a_language_model_is_refused_in_one_line(tiny: list[str], tmp_path: Path) -> None:
    save_adapters(tmp_path, make_policy(reward_model(seed=9)), "CAUSAL_LM")
    result = train("sort", *tiny, f"reward_model={tmp_path / 'adapters'}")
    assert result.exit_code == 2
    assert "adapters of a language model" in result.stderr
    assert not (tmp_path / "run").exists()


# ---- tasks
# ------------------------------------------------------------------------------------------


def test_a_judged_task_is_episodic_and_keeps_the_members_of_the_task(folder: Path) -> None:
    task = as_episodic(DigitSort())
    judged = judged_by(task, make_byte_tokenizer(), str(folder), "cpu")
    assert isinstance(judged, EpisodicTask)
    assert as_episodic(judged) is judged
    names: Sequence[str] = ("max_turns", "max_new_tokens", "system_prompt", "parser", "cut_off_reward", "success_reward", "facts")
    assert [getattr(judged, name) for name in names] == [getattr(task, name) for name in names]


def test_a_judged_data_set_is_still_passed_row_by_row(tmp_path: Path, folder: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(20)))
    task = as_episodic(build_task(TaskSection(kind="data"), data=str(data), judged=True))
    judged = judged_by(task, make_byte_tokenizer(), str(folder), "cpu")
    assert isinstance(judged, JudgedTask)
    section = compose(["sort", "rollout.prompts=18", "rollout.group_size=1"]).rollout
    asked = make_training_requests(judged, section, seed=0)()
    assert len({request.meta["problem_id"] for request in asked}) == 18
