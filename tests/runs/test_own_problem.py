"""`ludic train model=... data=... reward=...`: whole runs on tiny models from disk."""

import json
import re
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import train_until
from safetensors.torch import load_file
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.recipes.compose import compose
from ludic.recipes.model import make_small_model

REWARDS = """
calls = []


def vowels(completions, **columns):
    calls.append(len(completions))
    return [sum(letter in "aeiou" for letter in text) / 4 for text in completions]


async def short(completions, limit, **columns):
    return [float(len(text) <= most) if most else None for text, most in zip(completions, limit)]


def odd(completion_ids, **columns):
    return [sum(token % 2 for token in ids) / 4 for ids in completion_ids]


def chatty(prompts, completions, **columns):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [float(completion[0]["role"] == "assistant") for completion in completions]


def half(completions, **columns):
    return [0.5] * len(completions)


def early(prompts, completions, **columns):
    return [float(prompt < "e") for prompt in prompts]


def broken(completions, **columns):
    raise ZeroDivisionError("the reward divides by nothing")


def fails_on_a(prompts, completions, **columns):
    if any(prompt == "a?" for prompt in prompts):
        raise ZeroDivisionError("a")
    return [1.0] * len(completions)
"""
ROWS = [{"prompt": f"{letter}?", "answer": letter, "limit": 3} for letter in "abcdefghij"]
TINY = [
    *("threads=1", "steps=2", "rollout.prompts=2", "rollout.group_size=4", "rollout.log_every=1", "task.args.max_new_tokens=4"),
    *("evaluation.samples_per_prompt=2", "task.args.num_heldout=3"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model on disk."""
    path = tmp_path_factory.mktemp("model")
    sizes = ["hidden_size=16", "num_heads=2", "num_kv_heads=1", "intermediate_size=16"]
    torch.manual_seed(0)
    make_small_model(compose([f"network.{size}" for size in sizes]).network).save_pretrained(path)
    make_byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def chat_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a chat template."""
    path = tmp_path_factory.mktemp("chat")
    make_small_model(
        compose(["network.hidden_size=16", "network.num_heads=2", "network.num_kv_heads=1"]).network
    ).save_pretrained(path)
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The current directory, with `problems.jsonl` and `own_problem_rewards.py`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_problem_rewards.py").write_text(REWARDS)
    write(tmp_path / "problems.jsonl", ROWS)
    yield tmp_path
    sys.modules.pop("own_problem_rewards", None)


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(*arguments: str):
    return CliRunner().invoke(app, ["train", *TINY, "output=.", "name=run", *arguments])


def trained(*arguments: str) -> str:
    result = train(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_several_rewards_are_normalised_apart(model: Path, here: Path) -> None:
    rewards = ["reward=[own_problem_rewards:odd,own_problem_rewards:half]", "reward_weights=[1.0,0.1]"]
    trained(f"model={model}", "data=problems.jsonl", *rewards, "reward_normalize=each", "steps=1")
    lines = [json.loads(line) for line in (here / "run" / "rollouts.jsonl").read_text().splitlines()]
    credit = [line["meta"]["engine"]["credit"][0] for line in lines]
    odd = [line["steps"][-1]["info"]["rewards/odd"] for line in lines]
    # `half` adds 0; of the other, centred and scaled in its group, the batch's deviation is 1
    assert len(set(odd)) > 1
    groups = [np.array(odd[i : i + 4]) for i in (0, 4)]
    total = np.concatenate([(group - group.mean()) / (group.std() + 1e-8) for group in groups])
    assert credit == pytest.approx(total / total.std(), abs=1e-5)


def test_remax_plays_a_greedy_answer_in_each_group_and_does_not_train_it(model: Path, here: Path) -> None:
    shown = trained(f"model={model}", "data=problems.jsonl", "reward=own_problem_rewards:vowels", "algorithm=remax")
    assert "2 steps of 2 problems x 5 answers" in shown
    lines = [json.loads(line) for line in (here / "run" / "rollouts.jsonl").read_text().splitlines()]
    greedy = [line for line in lines if line["meta"]["request_meta"].get("greedy")]
    assert (len(lines), len(greedy)) == (20, 4)
    assert [line["meta"]["engine"]["credit"] for line in greedy] == [[0.0]] * 4
    assert summary()["samples"]["trained"] <= 16


def summary(run: str = "run") -> dict:
    return json.loads(Path(run, "summary.json").read_text())


def rollouts(run: str = "run") -> list[dict]:
    return [json.loads(line) for line in Path(run, "rollouts.jsonl").read_text().splitlines()]


def test_a_data_file_and_a_reward_function_are_enough(here: Path, model: Path) -> None:
    given = [f"model={model}", "data=problems.jsonl", "reward=own_problem_rewards:vowels", "evaluation.solved_at=0.5"]
    shown = trained(*given)
    assert "the reward sees what vowels returned" in shown
    assert "demonstrations" not in shown
    assert list(summary()) == [
        *("status", "stopped_by", "model", "algorithm", "versions"),
        *("before", "after", "solved_at", "intervals", "heldout", "wall_s", "phases_s", "padding", "memory"),
        *("steps", "idle_steps", "stopped_early", "episodes", "samples", "clip_fraction"),
        *("mismatch", "weight_sync", "overlap", "actors", "seed", "config_hash"),
    ]
    assert set(summary()["before"]) == set(summary()["after"]) == {"sampled_reward", "greedy_accuracy"}
    assert summary()["steps"] == 2
    for name in ("config.yaml", "metrics.jsonl", "rollouts.jsonl", "summary.json", "reward.png", "model/model.safetensors"):
        assert Path("run", name).stat().st_size > 0, name
    calls = sys.modules["own_problem_rewards"].calls
    assert calls == [
        6,
        3,
        8,
        8,
        6,
        3,
    ]  # 3 held-out problems, sampled twice and greedily; 2 batches of 2 x 4; the held-out problems again


def test_rewards_with_another_maximum_have_no_accuracy_without_a_threshold(here: Path, model: Path) -> None:
    """Regression test: right answers of a reward of at most 0.5 were shown as wrong, with accuracy
    0."""
    given = [f"model={model}", "data=problems.jsonl", "reward=own_problem_rewards:half", "steps=0"]
    shown = trained(*given)
    assert not set("✓✗") & set(shown)
    assert "evaluation.solved_at=NUMBER" in " ".join(shown.split())
    assert (summary()["solved_at"], summary()["after"]) == (None, {"sampled_reward": 0.5, "greedy_reward": 0.5})
    shown = trained(*given, "name=told", "evaluation.solved_at=0.5")
    assert "✓" in shown
    assert "✗" not in shown
    assert (summary("told")["solved_at"], summary("told")["after"]["greedy_accuracy"]) == (0.5, 1.0)
    found = evaluated("told", "k=2")
    assert (found["solved_at"], found["accuracy"]["value"]) == (0.5, 1.0)
    found = evaluated("run", "k=2")
    assert (found["solved_at"], found["accuracy"], found["reward"]["value"]) == (None, None, 0.5)


def test_rewards_of_0_and_1_count_as_wrong_and_right_by_default(here: Path, model: Path) -> None:
    trained(f"model={model}", "data=problems.jsonl", "reward=own_problem_rewards:early", "steps=0")
    assert summary()["solved_at"] == 1.0
    assert summary()["after"]["greedy_accuracy"] == summary()["after"]["sampled_reward"]
    assert evaluated("run", "temperature=0")["accuracy"]["value"] == pytest.approx(summary()["after"]["greedy_accuracy"])


def evaluated(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["eval", "output=evaluations", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_reward_of_a_rollout_is_the_functions_value_for_its_text(here: Path, model: Path) -> None:
    trained(f"model={model}", "data=problems.jsonl", "reward=own_problem_rewards:vowels", "task.args.max_new_tokens=60")
    lines = rollouts()
    assert len(lines) == 16
    texts = [line["steps"][0]["action"] for line in lines]
    assert [line["total_reward"] for line in lines] == [sum(letter in "aeiou" for letter in text) / 4 for text in texts]
    assert [line["steps"][0]["info"]["row"]["answer"] for line in lines] == [line["steps"][0]["prev_obs"][0] for line in lines]


def test_several_functions_with_weights_are_reported_by_name(here: Path, model: Path) -> None:
    names = "[own_problem_rewards:vowels,own_problem_rewards:short]"
    weights = "reward_weights=[2.0,0.5]"
    shown = trained(f"model={model}", "data=problems.jsonl", f"reward={names}", weights, "evaluation.solved_at=1")
    assert "2 * vowels + 0.5 * short" in shown
    after = summary()["after"]
    assert set(after) == {"sampled_reward", "greedy_accuracy", "rewards/vowels", "rewards/short"}
    assert after["sampled_reward"] == pytest.approx(2 * after["rewards/vowels"] + 0.5 * after["rewards/short"])
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    for line, name in product(lines, ("train/rewards/vowels", "train/rewards/short")):
        assert line[f"{name}/mean"] == pytest.approx(line[name])
        assert 0 <= line[f"{name}/std"] <= 1


def test_prompts_that_nearly_fill_the_context_are_told_with_numbers(here: Path, model: Path, caplog) -> None:
    """A prompt has 2 tokens (one a byte), the system prompt 17, the empty line between them 2:
    21 of 25, so that 4 of the 4 tokens of an answer fit, and one more does not."""
    given = [f"model={model}", "data=problems.jsonl", "reward=own_problem_rewards:vowels", "steps=1"]
    tight = ["rollout.system_prompt=Answer in letters", "trainer.max_seq_len=25"]
    trained(*given, *tight, "name=fits")
    assert "prompts leave" not in caplog.text
    trained(*given, *tight, "rollout.max_new_tokens=5", "name=tight")
    [said] = [record.getMessage() for record in caplog.records if "prompts leave" in record.getMessage()]
    assert re.search("7 of the first 7 prompts .*5 tokens", said)
    assert re.search(r"trainer\.max_seq_len is 25 .*21, 19 .*system prompt", said)
    assert "raise trainer.max_seq_len" in said


def test_a_chat_model_gets_the_messages_of_the_data_in_its_template(here: Path, chat_model: Path) -> None:
    messages = [[{"role": "system", "content": "S"}, {"role": "user", "content": row["prompt"]}] for row in ROWS]
    write(here / "chat.jsonl", [{"prompt": prompt} for prompt in messages])
    trained(f"model={chat_model}", "data=chat.jsonl", "reward=own_problem_rewards:chatty", "rollout.system_prompt=unused")
    assert summary()["before"]["sampled_reward"] == 1.0
    step = rollouts()[0]["steps"][0]
    asked = bytes(token - 3 for token in step["trace"]["prompt_token_ids"]).decode()
    assert asked == f"[system]S[user]{step['prev_obs']}[assistant]"


def test_a_text_prompt_becomes_one_user_message_for_a_chat_model(here: Path, chat_model: Path) -> None:
    trained(f"model={chat_model}", "data=problems.jsonl", "reward=own_problem_rewards:vowels", "rollout.system_prompt=Vowels.")
    step = rollouts()[0]["steps"][0]
    asked = bytes(token - 3 for token in step["trace"]["prompt_token_ids"]).decode()
    assert asked == f"[system]Vowels.[user]{step['prev_obs']}[assistant]"


def test_completions_in_the_data_are_used_for_the_warm_up(here: Path) -> None:
    write(here / "pairs.jsonl", [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS])
    sizes = ["network.hidden_size=16", "network.num_heads=2", "network.num_kv_heads=1"]
    arguments = ["data=pairs.jsonl", "reward=own_problem_rewards:vowels", *sizes]
    assert "needs model=DIRECTORY" in train(*arguments).stderr
    shown = trained(*arguments, "warmup.steps=2", "warmup.batch_size=4")
    assert "demonstrations" in shown


def test_gsm8k_from_a_file_needs_no_python_code(here: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grader is replaced by an immediate one; the real grader is tested with the
    environments."""

    class Grader:
        async def grade(self, answer: str, target: str) -> bool:
            return int(target) % 2 == 0

    monkeypatch.setattr("ludic.envs.maths.grader.shared_grader", Grader)
    write(here / "gsm8k.jsonl", [{"question": f"What is {n} + 1?", "answer": f"One more.\n#### {n + 1}"} for n in range(10)])
    trained(f"model={model}", "data=gsm8k.jsonl", "reward=gsm8k", "rollout.log_every=1")
    lines = rollouts()
    assert [line["total_reward"] for line in lines] == [
        int(line["steps"][0]["info"]["row"]["answer"][-1]) % 2 == 0 for line in lines
    ]


def test_a_stopped_and_resumed_run_equals_the_uninterrupted_run(here: Path, model: Path) -> None:
    given = [f"model={model}", "data=problems.jsonl", "reward=own_problem_rewards:vowels", "steps=4", "trainer.lr=1e-2"]
    given.append("evaluation.samples_per_prompt=32")  # some with a vowel
    trained(*given, "name=whole")
    assert train_until("train", 2, [*TINY, "output=.", *given, "name=parts"]) == 130
    result = CliRunner().invoke(app, ["train", "--resume", "parts"])
    assert result.exit_code == 0, result.output
    one, two = (load_file(Path(name, "model", "model.safetensors")) for name in ("whole", "parts"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert summary("parts")["after"] == summary("whole")["after"] != summary("whole")["before"]
    flat = [[line["meta"]["problem_id"] for line in rollouts(run)] for run in ("whole", "parts")]
    assert flat[0] == flat[1]


# ---- errors
# ------------------------------------------------------------------------------------------


def test_a_reward_that_always_fails_ends_the_run_with_its_error(here: Path, model: Path) -> None:
    result = train(f"model={model}", "data=problems.jsonl", "reward=own_problem_rewards:broken")
    assert result.exit_code == 1
    assert re.search("reward function broken .*ZeroDivisionError: .*divides by nothing", result.stderr)
    assert "Traceback" not in result.stderr.split("ludic:")[-1]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (
            [{"prompt": letter * 30} for letter in "abcdefghij"],
            ["trainer.max_seq_len=20"],
            r"trainer\.max_seq_len \(20\) .*shortest prompt \(30 tokens\)",
        ),
        (
            [
                {
                    "prompt": [
                        {"role": role, "content": letter} for role in (["user", "assistant"] if letter in "ij" else []) + ["user"]
                    ]
                }
                for letter in "abcdefghij"
            ],
            [],
            r"prompts of messages, .*chat_template=FILE, or tokenizer=FOLDER",
        ),
    ],
)
def test_prompts_that_are_too_long_are_refused_before_anything_is_written(
    here: Path, model: Path, rows, settings, message
) -> None:
    write(here / "long.jsonl", rows)
    result = train(f"model={model}", "data=long.jsonl", "reward=own_problem_rewards:early", *settings)
    assert result.exit_code != 0
    assert re.search(message, " ".join(result.stderr.split()))
    assert not Path("run").exists()


def test_ungraded_answers_are_counted_and_are_not_zeros(here: Path, model: Path) -> None:
    """Every prompt except `a?` has reward 1, so a mean below 1 would mean that a failure counts as
    0."""
    write(here / "held.jsonl", [{"prompt": "a?"}, {"prompt": "z?"}])
    given = ["data=problems.jsonl", "reward=own_problem_rewards:fails_on_a", "task.args.heldout_data=held.jsonl"]
    shown = trained(f"model={model}", *given, "task.args.num_heldout=null")
    assert summary()["before"] == summary()["after"] == {"sampled_reward": 1.0, "greedy_accuracy": 1.0}
    assert re.search("3 answers failed .*in no rate", " ".join(shown.split()))
    assert "could not be graded" in shown.split("Sampled answers")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data=missing.jsonl", "reward=own_problem_rewards:vowels"], "missing.jsonl does not exist"),
        (["data=problems.jsonl"], "needs data=FILE and reward=MODULE:FUNCTION"),
        (["data=problems.jsonl", "reward=own_problem_rewards:vowel"], "has no 'vowel'"),
        (["data=problems.jsonl", "reward=own_problem_rewards.py:vowels"], "such as own_problem_rewards:vowels"),
        (["data=bad.jsonl", "reward=own_problem_rewards:vowels"], "bad.jsonl, line 2: prompt must be text"),
        (["sort", "data=problems.jsonl", "reward=own_problem_rewards:vowels"], "task.kind (sort) makes its own problems"),
        (["data=problems.jsonl", "reward=own_problem_rewards:vowels", "reward_weights=[1,2]"], "2 weights for 1"),
        (["data=problems.jsonl", "reward=own_problem_rewards:vowels", "dta=x"], "did you mean data"),
    ],
)
def test_an_invalid_setting_is_a_one_line_error_and_leaves_no_folder(
    here: Path, model: Path, arguments: list[str], message: str
) -> None:
    write(here / "bad.jsonl", [{"prompt": "a"}, {"prompt": 3}])
    result = train(f"model={model}", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not Path("run").exists()
