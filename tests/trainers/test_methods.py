"""One object a method: it makes the run that the command makes."""

import asyncio
import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_samples import tiny_model
from typer.testing import CliRunner

import ludic
from ludic import DPO, GRPO, PPO, SFT, RewardModel
from ludic.cli.app import app
from ludic.errors import CheckpointError, ConfigError, ConfigTypeError
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.recipes.compose import compose
from ludic.recipes.foreign_names import ARGUMENTS
from ludic.runs.reinforce import RLRun
from ludic.tasks import DigitSort, Tools
from ludic.trainers.inputs import as_plain
from ludic.training import Callback, KeepBest, StopOnMetric
from ludic.training.reward_functions import given_rewards, make_reward, register_reward, reward_names

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(20)]
SMALL = {
    "threads": 1,
    "steps": 2,
    "rollout": {"prompts": 2, "group_size": 2},
    "evaluation": {"prompts": 2, "samples_per_prompt": 1},
    "task.args.max_new_tokens": 3,
}


def digits(completions, answer, **columns):
    return [float(sum(char.isdigit() for char in text)) - len(right) for text, right in zip(completions, answer, strict=True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    make_byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weights(run: str) -> dict[str, torch.Tensor]:
    return load_file(Path("runs", run, "model", "model.safetensors"))


def test_the_object_makes_the_run_of_the_command_bit_for_bit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of a module has its name there; the rows are a file that the command reads."""
    Path("door_rewards.py").write_text(
        "def digits(completions, answer, **columns):\n"
        "    return [float(sum(c.isdigit() for c in text)) - len(right) for text, right in zip(completions, answer)]\n"
    )
    monkeypatch.syspath_prepend(Path.cwd())
    from door_rewards import digits as importable

    summary = GRPO(model, importable, ROWS, name="object", **SMALL).train()
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    result = CliRunner().invoke(app, ["train", "runs/object/config.yaml", "name=command"])
    assert result.exit_code == 0, result.output
    ours, theirs = weights("object"), weights("command")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {path.name for path in Path("runs/object").iterdir()} == {path.name for path in Path("runs/command").iterdir()}


EPISODES = {
    "threads": 1,
    "steps": 1,
    "warmup": {"steps": 0},
    "rollout": {"prompts": 2, "group_size": 2},
    "evaluation": {"prompts": 2, "samples_per_prompt": 1},
    "network": {"end_of_turn": "newline", "hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1},
}


def test_a_task_of_ones_own_with_an_environment_is_the_run_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("door_task.py").write_text("from ludic.tasks import Tools\n\n\nclass Mine(Tools):\n    pass\n")
    monkeypatch.syspath_prepend(Path.cwd())
    from door_task import Mine

    summary = GRPO(None, task=Mine, name="object", **EPISODES).train()
    assert (summary["status"], summary["steps"]) == ("finished", 1)
    GRPO(None, task="door_task:Mine", name="named", **EPISODES).train()
    result = CliRunner().invoke(app, ["train", "runs/object/config.yaml", "name=command"])
    assert result.exit_code == 0, result.output
    ours = weights("object")
    assert all(torch.equal(ours[name], weights(run)[name]) for run in ("named", "command") for name in ours)


def test_a_class_of_a_script_is_trained_and_goes_on_as_functions_do(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("door_class.py").write_text("from ludic.tasks import Tools\n\n\nclass Elsewhere(Tools):\n    pass\n")
    monkeypatch.syspath_prepend(Path.cwd())
    from door_class import Elsewhere

    settings = {**EPISODES, "steps": 2}
    assert GRPO(None, task=HereOnly, name="script", **settings).recipe.task.kind == "HereOnly"
    first = GRPO(None, task=HereOnly, name="script", **{**settings, "steps": 1}).train()
    assert (first["status"], first["steps"]) == ("finished", 1)
    assert GRPO(None, task=HereOnly, name="script", **settings).train(resume=True)["steps"] == 2
    GRPO(None, task=Elsewhere, name="module", **settings).train()
    assert all(torch.equal(value, weights("module")[name]) for name, value in weights("script").items())
    refused = CliRunner().invoke(app, ["eval", "runs/script"])
    assert "task.kind (HereOnly) is not known" in " ".join(refused.output.split())


def test_the_weight_of_one_reward_is_a_number_or_a_list() -> None:
    for weights in (2, [2.0], (2,), np.float32(2), np.array([2.0]), [torch.tensor(2.0)]):
        assert GRPO(None, digits, ROWS, reward_weights=weights).recipe.reward_weights == [2.0]


def test_numbers_of_numpy_are_settings() -> None:
    recipe = GRPO(
        None, digits, ROWS, steps=np.int64(3), trainer={"lr": np.float64(1e-4)}, **{"rollout.prompts": np.int32(2)}
    ).recipe
    assert (recipe.steps, recipe.trainer.lr, recipe.rollout.prompts) == (3, 1e-4, 2)


def test_a_class_that_is_a_setting_stays_one() -> None:
    assert as_plain({"dtype": np.float32}) == {"dtype": np.float32}  # whose method `tolist` is that of its numbers


@pytest.mark.parametrize("weights", [[None], [[1.0]], "1", {"digits": 1.0}])
def test_weights_that_are_no_numbers_are_an_error_of_the_setting(weights: Any) -> None:
    with pytest.raises(ConfigError, match=r"reward_weights \(.*\) .*one for each reward function"):
        GRPO(None, digits, ROWS, reward_weights=weights, **SMALL).train()


def test_weights_without_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="set"):
        GRPO(None, [digits, "math"], ROWS, reward_weights={0.5, 2.0})


def test_the_arguments_of_a_task_are_its_own() -> None:
    recipe = GRPO(None, task={"kind": "tools", "args": {"format": "chat"}}).recipe
    assert (recipe.task.kind, recipe.task.args) == ("tools", {"format": "chat"})
    assert GRPO(None, task="tools").recipe.task.args == {}  # none of those of the default recipe


class HereOnly(Tools):
    pass


HereOnly.__module__ = "__main__"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "give reward functions and rows, or task="),
        ({"task": {"args": {}}}, "nothing to train on"),
        ({"task": "tools", "dataset": ROWS, "reward_functions": digits}, "own problems and rewards"),
        ({"task": HereOnly, "place": {"actors": 1}}, "actors cannot import the task 'HereOnly'"),
        ({"task": object()}, r"task \(object\) must be a class"),
    ],
)
def test_what_is_no_task_is_refused_with_the_remedy(arguments, said) -> None:
    with pytest.raises((ConfigError, ConfigTypeError), match=said):
        GRPO(None, **arguments)


def test_everything_is_reachable_below_it_and_callbacks_are_called(model: Path) -> None:
    class Watch(Callback):
        seen: list[int] = []  # noqa: RUF012

        def on_step(self, event):
            self.seen.append(event.step)
            event.stop("one is enough")

    grpo = GRPO(str(model), digits, ROWS, callbacks=[Watch()], name="watched", **SMALL)
    for member in ("trainer", "model", "tokenizer", "folder"):
        with pytest.raises(ConfigError, match=r"call train\(\)"):
            getattr(grpo, member)
    assert grpo.recipe.rollout.group_size == 2
    summary = grpo.train()
    assert (Watch.seen, summary["stopped_by"]["reason"]) == ([1], "one is enough")
    assert grpo.trainer.current_step == 1
    assert grpo.trainer.model is grpo.model is grpo.run.parts.model
    assert grpo.tokenizer.decode(grpo.tokenizer("1+1=")["input_ids"]) == "1+1="
    assert grpo.folder.resolve() == Path("runs/watched").resolve()
    assert json.loads((grpo.folder / "summary.json").read_text()) == summary


def test_a_run_goes_on_with_the_same_settings_or_more_steps_and_with_no_others(model: Path) -> None:
    same = {**SMALL, "trainer": {"lr_scheduler_type": "constant_with_warmup"}}  # does not depend on the number of steps
    longer = {**same, "steps": 3}
    GRPO(model, digits, ROWS, name="whole", **longer).train()
    first = GRPO(model, digits, ROWS, name="parts", **same)
    first.train(resume=True)  # there is nothing to go on with yet
    more = GRPO(model, digits, ROWS, name="parts", **longer)
    assert more.train(resume=True)["steps"] == 3
    ours, theirs = weights("parts"), weights("whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(ConfigError, match=r"trainer\.lr is"):
        GRPO(model, digits, ROWS, name="parts", **{**longer, "trainer.lr": 0.5}).train(resume=True)
    with pytest.raises(ConfigError, match="set name="):
        GRPO(model, digits, ROWS, **SMALL).train(resume=True)


def test_it_runs_where_an_event_loop_is_running_as_in_a_notebook(model: Path) -> None:
    async def cell():
        return GRPO(model, lambda completions, **_: [1.0] * len(completions), ROWS, name="cell", **SMALL).train()

    assert asyncio.run(cell())["status"] == "finished"


def test_each_object_trains_on_its_own_functions_whatever_their_names(model: Path) -> None:
    """Lambdas all have one name, and so have the methods of two objects."""
    called = []

    def objects_own(number):
        return lambda completions, **_: [float(called.append(number) or number)] * len(completions)

    first = GRPO(model, objects_own(1), ROWS, name="first", **{**SMALL, "steps": 1})
    GRPO(model, objects_own(2), ROWS, name="second", **SMALL)
    first.train()
    assert set(called) == {1}
    assert "reward" not in reward_names()  # nothing is left behind


def test_functions_of_an_object_are_seen_inside_its_block_alone() -> None:
    with given_rewards({"mine": digits}):
        assert make_reward("mine") is digits
        assert "mine" in reward_names()
    assert "mine" not in reward_names()


def test_a_registered_reward_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludic.training.reward_functions._OWN", {})
    register_reward("reward", lambda: digits)
    with pytest.raises(ConfigError, match="there is a reward 'reward' already"):
        GRPO("m", lambda completions: [1.0] * len(completions), ROWS)
    assert make_reward("reward") is digits


def test_a_second_run_begins_with_callbacks_as_the_first_did(model: Path) -> None:
    class Count(Callback):
        steps = 5
        ends: list[int] = []  # noqa: RUF012

        def on_step(self, event):
            self.steps += 1

        def on_end(self, event):
            self.ends.append(self.steps)

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    grpo = GRPO(model, digits, ROWS, callbacks=[Count()], **{**SMALL, "steps": 1})
    grpo.train()
    grpo.train()
    assert Count.ends == [6, 6]


def test_a_stop_while_the_model_is_loaded_ends_the_run_before_its_first_step(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grpo = GRPO(model, digits, ROWS, name="early", **{**SMALL, "steps": 1})
    build = RLRun.build

    def build_while_stopped(*arguments):
        grpo.stop()
        return build(*arguments)

    monkeypatch.setattr(RLRun, "build", build_while_stopped)
    summary = grpo.train()
    assert (summary["status"], summary["steps"]) == ("interrupted", 0)
    monkeypatch.setattr(RLRun, "build", build)
    assert grpo.train(resume=True)["status"] == "finished"  # the request was of the first


def test_sft_and_a_reward_model_are_one_object_each(model: Path) -> None:
    pairs = [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS]
    sft = SFT(model, pairs, eval_dataset=pairs[:3], epochs=1, batch_size=8, threads=1).train()
    assert (sft["algorithm"], sft["steps"], sft["after"]["tokens"] > 0) == ("sft", 3, True)
    preferences = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "no"} for row in ROWS]
    judge = RewardModel(model, preferences, epochs=1, batch_size=8, threads=1, heldout=0.2).train()
    assert (judge["algorithm"], judge["status"]) == ("bradley_terry", "finished")


def test_dpo_is_one_object_with_another_model_as_its_reference(model: Path) -> None:
    preferences = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "no"} for row in ROWS]
    small = {"epochs": 1, "batch_size": 8, "threads": 1, "heldout": 0.2, "max_new_tokens": 3}
    policy = DPO(model, preferences, ref_model=model, loss={"beta": 0.3}, **small)
    summary = policy.train()
    assert (summary["algorithm"], summary["status"], summary["beta"]) == ("dpo", "finished", 0.3)
    assert policy.recipe.reference.model == str(model)
    assert len(policy.trainer.reference_logps) == 40


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GRPO("m", digits, []), ConfigError, "the data has no rows"),
        (lambda: GRPO("m", digits, ["2+2="]), ConfigTypeError, "row 0 of the data is str"),
        (lambda: GRPO("m", digits, 3), ConfigTypeError, r"the data \(int\)"),
        (lambda: GRPO("m", [digits, digits], ROWS), ConfigError, "reward functions .*name '.*digits'"),
        (lambda: GRPO("m", [3], ROWS), ConfigTypeError, r"a reward \(int\) must be a function"),
        (lambda: GRPO(torch.nn.Linear(1, 1), digits, ROWS), ConfigTypeError, r"model \(Linear\) .*hub id"),
        (lambda: GRPO("m", digits, ROWS, learning_rate=1e-5), ConfigError, "it is called trainer.lr"),
        (lambda: GRPO("m", digits, ROWS, num_generations=4), ConfigError, "it is called rollout.group_size"),
        (lambda: GRPO("m", digits, ROWS, reward="math"), ConfigError, "reward is an argument of its own"),
        (lambda: GRPO("m", digits, ROWS, trainers=2), ConfigError, r"place\.trainers \(2\) .*run `ludic train`"),
        (lambda: SFT("m", ROWS, place={"on": "slurm"}), ConfigError, r"place\.on \(slurm\) .* run `ludic sft`"),
        (lambda: GRPO("m", lambda **_: [], ROWS, place={"actors": 1}), ConfigError, "actors cannot import the reward 'reward'"),
        (lambda: SFT("m", ROWS, epochs=0), ConfigError, r"epochs \(0\) must be at least 1"),
        (
            lambda: DPO("m", ROWS, ref_model="r", **{"reference.model": "q"}),
            ConfigError,
            r"reference\.model is an argument of its own",
        ),
        (lambda: RewardModel("m", ROWS, beta=1), ConfigError, "there is no setting 'beta'"),
    ],
)
def test_wrong_arguments_are_refused_when_the_object_is_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_row_without_a_column_that_a_reward_asks_for_is_refused_at_once():
    rows = [dict(row) for row in ROWS]
    del rows[3]["answer"]
    with pytest.raises(ConfigError, match=r"row 3 .*has no answer, .*reward digits"):
        GRPO("m", digits, rows)
    with pytest.raises(ConfigError, match=r"row 0 .*has no answer"):
        GRPO("m", digits, ROWS, eval_dataset=[{"prompt": "2+2="}, {"prompt": "1+1=", "answer": "2"}])
    with pytest.raises(ConfigError, match=r"row 0 .*has no answer, .*reward digits .*columns: prompt"):
        GRPO("m", digits, [{"prompt": "2+2="}])
    rows[3]["answer"] = None  # which says that there is none
    GRPO("m", [digits, lambda completions, hint="": []], rows)


def test_tracebacks_of_wrong_input_end_at_the_users_line(model: Path) -> None:
    """Regression test: a wrong setting printed 15 frames of the library before its sentence."""
    with pytest.raises(ConfigError, match="tempo") as caught:
        GRPO(model, digits, ROWS, tempo=3)
    frames = [entry.path.name for entry in caught.traceback]
    assert (frames, caught.value.__cause__, caught.value.__suppress_context__) == (["test_methods.py", "base.py"], None, True)
    with pytest.raises(ConfigError, match=r"num_heldout \(0\) .*at least 1 and at most 19") as caught:
        GRPO(model, digits, ROWS, **{**SMALL, "task.args.num_heldout": 0}).train()
    assert [entry.path.name for entry in caught.traceback] == ["test_methods.py", "base.py"]


def test_the_name_of_an_earlier_run_is_refused_before_the_model_is_loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GRPO(model, digits, ROWS, name="once", **{**SMALL, "steps": 0}).train()
    monkeypatch.setattr(RLRun, "build", lambda *_: pytest.fail("it was built"))
    with pytest.raises(CheckpointError, match=r"exists already.*in Python train\(resume=True\)"):
        GRPO(model, digits, ROWS, name="once", **SMALL).train()


@pytest.mark.parametrize(
    ("callback", "settings", "message"),
    [
        (KeepBest("sampled_reward"), {}, "sampled_reward; set trainer.eval_every_n_steps"),
        (StopOnMetric("accuracy", at=1), {"trainer.eval_every_n_steps": 1}, "this run measures sampled_reward, greedy_reward"),
    ],
)
def test_a_callback_that_would_never_act_is_refused_before_the_run(model: Path, callback, settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPO(model, digits, ROWS, callbacks=[callback], name="watched", **SMALL, **settings).train()
    assert not Path("runs/watched").exists()


def test_the_package_imports_its_objects_when_they_are_read():
    assert {"DPO", "GRPO", "Judge", "PPO", "SFT", "RewardModel"} == set(ludic.__all__)
    with pytest.raises(AttributeError, match="no attribute 'KTO'"):
        _ = ludic.KTO


PAIRS = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "?!"} for row in ROWS]


@pytest.mark.parametrize(
    ("make", "rows", "settings"),
    [
        (GRPO, ROWS, SMALL),
        (SFT, [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS], {"steps": 2, "batch_size": 4}),
        (DPO, PAIRS, {"steps": 2, "batch_size": 4, "answers": 0}),
        (RewardModel, PAIRS, {"steps": 2, "batch_size": 4}),
    ],
)
def test_every_object_can_recompute_activations(model: Path, make, rows, settings) -> None:
    """In one process, without `sharding`: the weights are those of the run that stores them."""
    given = [model, digits, rows] if make is GRPO else [model, rows]
    for name, keys in {"stored": {}, "recomputed": {"gradient_checkpointing": True}}.items():
        trained = make(*given, name=name, **{**settings, "threads": 1, **keys})
        trained.train()
        modules = trained.trainer.model.modules()
        assert any(getattr(module, "gradient_checkpointing", False) for module in modules) is bool(keys)
    ours, theirs = weights("recomputed"), weights("stored")
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)


def test_answers_are_sampled_as_the_section_says_and_end_at_a_stop(model: Path) -> None:
    """With `top_k=1` the two answers to a prompt are one; a stop ends them at their first token."""
    seen = []

    def note(completions, is_eval, **columns):
        seen.extend([] if is_eval else completions)
        return [1.0] * len(completions)

    greedy = {**SMALL, "steps": 1, "rollout.top_k": 1, "rollout.min_p": 0.1, "rollout.repetition_penalty": 1.1}
    GRPO(model, note, ROWS, name="free", **greedy).train()
    free = [*seen]
    assert len(free) == 4
    assert free[::2] == free[1::2]
    seen.clear()
    stop = sorted({text[0] for text in free})
    GRPO(model, note, ROWS, name="stopped", **greedy, **{"rollout.stop": stop}).train()
    assert max(map(len, seen)) < max(map(len, free))
    metrics = json.loads(Path("runs/stopped/metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["train/avg_completion_length"] == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GRPO(model="m", reward_funcs=digits, train_dataset=ROWS),
            "reward_funcs is an argument .*write reward_functions; t",
        ),
        (lambda: GRPO("m", digits, train_dataset=ROWS), "train_dataset is an argument .*write dataset"),
        (lambda: GRPO("m", digits, ROWS, args=object()), r"args is an argument .*the settings themselves"),
        (lambda: GRPO("m", digits, ROWS, peft_config=object()), r"peft_config is an argument .*write lora=\{'rank': 16"),
        (
            lambda: GRPO("m", digits, ROWS, tokenizer=make_byte_tokenizer()),
            "tokenizer is an argument .*write tokenizer= .*folder",
        ),
        (lambda: SFT(model="m", train_dataset=ROWS), "write dataset"),
        (lambda: DPO(model="m", train_dataset=ROWS, processing_class=None), "processing_class is an argument of TRL"),
        (lambda: RewardModel(model="m", train_dataset=ROWS), "write dataset"),
    ],
)
def test_an_argument_of_trl_is_answered_with_ours(make, message):
    with pytest.raises(ConfigTypeError, match=message):
        make()


def test_every_name_of_trl_that_is_refused_is_none_of_our_arguments_or_settings():
    """But for `tokenizer` and `reward_model`, whose values here are paths, and `tools` of GRPO."""
    ours = {name for method in (GRPO, SFT, DPO, RewardModel) for name in inspect.signature(method.__init__).parameters}
    assert set(ARGUMENTS) & ours == {"tools"}  # an argument of GRPO, and not of the others
    settings = {field.name for field in dataclasses.fields(compose(["sort"]))}
    assert set(ARGUMENTS) & settings <= {"tokenizer", "reward_model", "tools"}


def test_ppo_is_train_with_its_algorithm() -> None:
    recipe = PPO(None, digits, ROWS, critic={"model": "policy"}, algorithm_args={"lam": 0.9}).recipe
    assert (recipe.algorithm, recipe.critic.model, recipe.algorithm_args) == ("ppo", "policy", {"lam": 0.9})
    with pytest.raises(ConfigError, match=r"algorithm \(grpo\) of PPO is ppo"):
        PPO(None, digits, ROWS, algorithm="grpo")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": "grpo", "critic": {"model": "policy"}}, r"critic.model \(policy\) .*algorithm with a critic, not grpo"),
        ({"algorithm": "ppo", "algorithm_args": {"gamma": 2.0}}, r"gamma \(2.0\) must be"),
    ],
)
def test_a_critic_that_the_run_cannot_have_is_one_line(model: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        GRPO(model, digits, ROWS, name="refused", **{**SMALL, **settings}).train()


def test_a_critic_of_another_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "other")
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"critic.model \(.*other\) must have the policy's vocabulary"):
        PPO(model, digits, ROWS, name="refused", critic={"model": str(tmp_path / "other")}, **SMALL).train()


def test_environments_may_have_rows_functions_and_classes_of_the_script(model: Path) -> None:
    class Own(DigitSort):
        pass

    own = {
        "sums": {"data": ROWS, "reward": digits, "task": {"args": {"max_new_tokens": 3}}},
        "own": {"task": Own, "weight": {0: 1, 1: 2}},
    }
    settings = {name: value for name, value in SMALL.items() if name != "task.args.max_new_tokens"}
    trainer = GRPO(model, environments=own, name="mixed", **settings)
    assert trainer.recipe.recipe == "data"
    assert trainer.recipe.environments["own"] == {"task": {"kind": "Own"}, "weight": {0: 1, 1: 2}}
    assert set(trainer.train()["after"]) > {"sums/sampled_reward", "own/greedy_accuracy"}
    with pytest.raises(ConfigError, match=r"nothing to train on"):
        GRPO(model, environments={})
