"""A run killed anywhere and resumed equals the uninterrupted run: the same weights, each step once
in metrics.jsonl, each episode once in rollouts.jsonl, each image in its store. `pytest -m slow`
kills at every change on disk."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from benches.python.equal_runs import check_learning
from commands import NETWORK, exit_status, metrics_of, refused, same_weights, summary_of
from graded_shapes import SETTINGS as SHAPES
from killed_commands import killed_at, list_changes, run_to_end
from mixed_tasks import mixed
from safetensors.torch import load_file

from ludic.images.store import ImageStore
from ludic.runs.directory import RunDirectory

TINY = [
    *("threads=1", "warmup.steps=3", "warmup.batch_size=4", "steps=3", "rollout.prompts=2", "rollout.group_size=4"),
    *("rollout.log_every=1", "evaluation.prompts=3", "evaluation.samples_per_prompt=2", *NETWORK),
]
REWARD = ["reward=byte_rewards:mean_id", "task.args.max_new_tokens=4", "task.args.num_heldout=3"]
EVALUATED = [*TINY, *REWARD, "checkpoint.every_n_steps=2", "checkpoint.max_to_keep=1", "trainer.eval_every_n_steps=2"]
CHANGES = 59
"""Number of changes on disk that a run of EVALUATED makes."""


def problems(folder: Path) -> str:
    path = folder / "rows.jsonl"
    rows = [{"prompt": f"{n * 7919 % 100000}>", "completion": f"{n:03d}"} for n in range(30)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return f"data={path}"


def lines_of(run: Path) -> list[tuple[Any, ...]]:
    """The step or phase of each line of metrics.jsonl, and its loss."""
    return [(line["phase"], line["step"], line.get("train/loss"), line.get("eval/greedy_accuracy")) for line in metrics_of(run)]


def episodes_of(run: Path) -> list[Any]:
    lines = (json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines())
    return [
        (meta["episode_idx"], meta["problem_id"], meta["engine"]["sampling_seed"], line["total_reward"])
        for line in lines
        for meta in [line["meta"]]
    ]


def assert_is_the_run(run: Path, whole: Path) -> None:
    check_learning(whole)  # without a gradient any resume would end with these weights
    assert same_weights(run, whole)
    assert lines_of(run) == lines_of(whole)
    assert episodes_of(run) == episodes_of(whole)
    found, wanted = summary_of(run), summary_of(whole)
    for key in ("before", "after", "steps", "mismatch"):
        assert found[key] == wanted[key]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("whole")
    changes = list_changes("train", *EVALUATED, problems(parent), f"output={parent}", "name=run")
    assert len(changes) == CHANGES
    return parent / "run"


def any_moment(*quick: int) -> list[Any]:
    """All changes of a run; those that are not `quick` are tried by `pytest -m slow`."""
    return [pytest.param(n, marks=[] if n in quick else pytest.mark.slow) for n in range(3, CHANGES + 1)]


@pytest.mark.parametrize("moment", any_moment(11, 36))  # in the manifest of a checkpoint, and where it is amended
def test_a_run_killed_at_any_change_on_disk_resumes_to_the_uninterrupted_run(whole: Path, tmp_path: Path, moment: int) -> None:
    assert killed_at(moment, "train", *EVALUATED, problems(tmp_path), f"output={tmp_path}", "name=run")
    run_to_end("train", "--resume", str(tmp_path / "run"))
    assert_is_the_run(tmp_path / "run", whole)


@pytest.fixture(scope="module")
def whole_with_a_batch_ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("ahead")
    made = list_changes("train", *EVALUATED, problems(parent), "inference.batches_ahead=1", f"output={parent}", "name=run")
    assert len(made) == CHANGES
    return parent / "run"


@pytest.mark.parametrize("moment", any_moment(39))  # batch 3 is trained, from the checkpoint that it was in flight in
def test_a_run_with_a_batch_ahead_killed_at_any_change_resumes_to_the_uninterrupted_run(
    whole_with_a_batch_ahead: Path, tmp_path: Path, moment: int
) -> None:
    settings = [*EVALUATED, problems(tmp_path), "inference.batches_ahead=1"]
    assert killed_at(moment, "train", *settings, f"output={tmp_path}", "name=run")
    run_to_end("train", "--resume", str(tmp_path / "run"))
    assert_is_the_run(tmp_path / "run", whole_with_a_batch_ahead)


FILTERED = ["rollout.group_filter=byte_filters:even_sum", "rollout.order=submission", "rollout.patience=1000"]


@pytest.mark.integration
@pytest.mark.parametrize("own", [FILTERED, ["algorithm=maxent_grpo"]])
def test_a_filtered_run_or_one_of_maxent_that_is_killed_resumes_to_the_uninterrupted_run(tmp_path: Path, own: list[str]) -> None:
    settings = [*EVALUATED, problems(tmp_path), *own]
    run_to_end("train", *settings, f"output={tmp_path}", "name=whole")
    whole = tmp_path / "whole"
    assert own != FILTERED or sum(line.get("groups/rejected", 0) for line in metrics_of(whole)) > 0
    assert killed_at(
        "line reinforce 3", "train", *settings, f"output={tmp_path}", "name=run"
    )  # after a checkpoint of the reinforcement
    run_to_end("train", "--resume", str(tmp_path / "run"))
    assert (tmp_path / "run" / "summary.json").is_file()
    assert_is_the_run(tmp_path / "run", whole)


CURRICULUM = ["data.curriculum=pools", "curriculum.args={easy: 0.38, hard: 0.34, shares: {easy: 1, fit: 1, hard: 1}}"]


@pytest.mark.integration
@pytest.mark.parametrize("own", [[], ["inference.batches_ahead=1"], FILTERED], ids=["synchronous", "overlapped", "filtered"])
def test_a_killed_run_with_a_curriculum_picks_the_problems_of_the_uninterrupted_run(tmp_path: Path, own: list[str]) -> None:
    """Three problems, two a step, so that each is picked by the rewards of the steps before."""
    settings = [*EVALUATED, problems(tmp_path), "task.args.num_heldout=27", "steps=6", *CURRICULUM, *own]
    run_to_end("train", *settings, f"output={tmp_path}", "name=whole")
    whole = tmp_path / "whole"
    lines = [line for line in metrics_of(whole) if line["phase"] == "reinforce" and "train/loss" in line]
    assert max(line["groups/easy"] + line["groups/hard"] for line in lines) > 0
    for moment in ("line reinforce 3", "line reinforce 6"):
        assert killed_at(moment, "train", *settings, f"output={tmp_path}", f"name={moment[-1]}")
        run_to_end("train", "--resume", str(tmp_path / moment[-1]))
        assert_is_the_run(tmp_path / moment[-1], whole)


@pytest.mark.integration
@pytest.mark.parametrize("own", [[], ["inference.batches_ahead=1"], FILTERED], ids=["synchronous", "overlapped", "filtered"])
def test_a_killed_run_with_environments_resumes_to_the_uninterrupted_run(tmp_path: Path, own: list[str]) -> None:
    """The second environment begins at step 2; over-sampled groups must be of one size."""
    size = ["environments.two.rollout.group_size=4"] if own == FILTERED else []
    rows = problems(tmp_path).partition("=")[2]
    cadence = ["steps=5", "rollout.prompts=3", "checkpoint.every_n_steps=2", "checkpoint.max_to_keep=1"]
    settings = [*mixed(rows), *TINY, *cadence, *own, *size, f"output={tmp_path}"]
    run_to_end("train", *settings, "name=whole")
    whole = tmp_path / "whole"
    assert {problem.split("/")[0] for _, problem, _, _ in episodes_of(whole)} == {"rows", "two"}
    for moment in ("line reinforce 3", "line reinforce 5"):
        assert killed_at(moment, "train", *settings, f"name={moment[-1]}")
        run_to_end("train", "--resume", str(tmp_path / moment[-1]))
        assert_is_the_run(tmp_path / moment[-1], whole)


def test_a_damaged_checkpoint_is_named_and_the_run_resumes_from_the_one_before(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = [*EVALUATED, problems(tmp_path), "checkpoint.every_n_steps=1", "checkpoint.max_to_keep=2"]
    made = list_changes("train", *settings, f"output={tmp_path}", "name=whole")
    moment = moment_of(made, "line reinforce 3", after="line reinforce 2")
    assert killed_at(moment, "train", *settings, f"output={tmp_path}", "name=run")
    weights = tmp_path / "run" / "checkpoints" / "reinforce" / "step_000002" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    from typer.testing import CliRunner

    from ludic.cli.app import app

    verified = CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path / "run")])
    assert verified.exit_code == 1
    assert "damaged: the content of model.safetensors has changed" in verified.output
    resumed = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "run")])
    assert resumed.exit_code == 0, resumed.output
    assert re.search(r"model\.safetensors has changed; .*step_000001", caplog.text)
    assert_is_the_run(tmp_path / "run", tmp_path / "whole")
    assert CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path / "run")]).exit_code == 0


def moment_of(changes: list[str], name: str, *, after: str) -> int:
    """1-based index of the first change with that name after the last one named `after`."""
    start = len(changes) - changes[::-1].index(after)
    return changes.index(name, start) + 1


@pytest.mark.parametrize("adapted", ["a small model", pytest.param("a model that is loaded", marks=pytest.mark.integration)])
def test_a_kill_before_the_first_checkpoint_does_not_change_adapter_dropout(tmp_path: Path, adapted: str) -> None:
    settings = [
        *TINY,
        *REWARD,
        problems(tmp_path),
        "lora.rank=2",
        "lora.dropout=0.3",
        "trainer.lr=0.01",
        "checkpoint.every_n_steps=0",
    ]
    if adapted == "a model that is loaded":
        run_to_end("train", *TINY, "steps=0", f"output={tmp_path}", "name=start")
        settings += [f"model={tmp_path / 'start'}"]
    changes = list_changes("train", *settings, f"output={tmp_path}", "name=whole")
    moment = moment_of(changes, "line reinforce 2", after="line reinforce 1")
    assert killed_at(moment, "train", *settings, f"output={tmp_path}", "name=run")
    run_to_end("train", "--resume", str(tmp_path / "run"))
    adapters = [load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("run", "whole")]
    assert any(value.any() for name, value in adapters[0].items() if "lora_B" in name)
    assert_is_the_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.integration
def test_a_kill_before_the_first_checkpoint_does_not_change_model_dropout(tmp_path: Path) -> None:
    from training_samples import TOKENIZER
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=len(TOKENIZER), n_embd=16, n_layer=1, n_head=2, n_positions=64)).save_pretrained(
        tmp_path / "gpt2"
    )
    TOKENIZER.save_pretrained(tmp_path / "gpt2")
    settings = [*TINY, *REWARD, problems(tmp_path), f"model={tmp_path / 'gpt2'}", "trainer.lr=0.01", "checkpoint.every_n_steps=0"]
    changes = list_changes("train", *settings, f"output={tmp_path}", "name=whole")
    moment = moment_of(changes, "line reinforce 2", after="line reinforce 1")
    assert killed_at(moment, "train", *settings, f"output={tmp_path}", "name=run")
    run_to_end("train", "--resume", str(tmp_path / "run"))
    assert_is_the_run(tmp_path / "run", tmp_path / "whole")


def test_a_run_killed_between_saving_model_and_progress_is_not_trained_twice(tmp_path: Path) -> None:
    settings = [*TINY, *REWARD, problems(tmp_path), "checkpoint.every_n_steps=0"]
    changes = list_changes("train", *settings, f"output={tmp_path}", "name=whole")
    assert killed_at(
        moment_of(changes, "rename progress.json", after="rename model"), "train", *settings, f"output={tmp_path}", "name=run"
    )
    run_to_end("train", "--resume", str(tmp_path / "run"))
    assert_is_the_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.integration
def test_a_half_saved_model_is_not_needed_to_resume(tmp_path: Path) -> None:
    """The reinforcement phase has a checkpoint. The folder `model`, which earlier versions could
    leave incomplete, is replaced."""
    settings = [*TINY, *REWARD, problems(tmp_path), "checkpoint.every_n_steps=1"]
    changes = list_changes("train", *settings, f"output={tmp_path}", "name=whole")
    assert killed_at(
        moment_of(changes, "line reinforce 3", after="line reinforce 2"), "train", *settings, f"output={tmp_path}", "name=run"
    )
    torn = tmp_path / "run" / "model" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:100])
    run_to_end("train", "--resume", str(tmp_path / "run"))
    assert_is_the_run(tmp_path / "run", tmp_path / "whole")


def test_without_checkpoints_a_finished_policy_is_not_trained_again(whole: Path, tmp_path: Path) -> None:
    import shutil

    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints")
    progress = RunDirectory(run).read_progress()
    progress.phase = "reinforce"
    RunDirectory(run).write_progress(progress)
    assert "(3 steps)" in refused("train", "--resume", str(run))


def test_without_checkpoints_a_phase_restarts_and_says_so(tmp_path: Path) -> None:
    import shutil

    from typer.testing import CliRunner

    from ludic.cli.app import app

    settings = ["threads=1", "rows=40", "batch_size=8", "epochs=1", "heldout=0.1", *NETWORK, "checkpoint.every_n_steps=1"]
    changes = list_changes("sft", *settings, f"output={tmp_path}", "name=whole")
    moment = changes.index("line sft 4") + 1
    assert killed_at(moment, "sft", *settings, f"output={tmp_path}", "name=run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    said = CliRunner().invoke(app, ["sft", "--resume", str(tmp_path / "run")]).output
    assert re.search("3 steps of sft .*no checkpoint", " ".join(said.split()))
    steps = [line["step"] for line in metrics_of(tmp_path / "run") if "train/loss" in line]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.integration
def test_an_incomplete_base_of_an_earlier_version_is_rewritten(tmp_path: Path) -> None:
    run_to_end("train", *TINY, *REWARD, problems(tmp_path), "lora.rank=2", f"output={tmp_path}", "name=first")
    settings = [*TINY, *REWARD, problems(tmp_path), "lora.rank=2", f"model={tmp_path / 'first' / 'adapter'}", "warmup.steps=0"]
    changes = list_changes("train", *settings, f"output={tmp_path}", "name=whole")
    assert killed_at(changes.index("line reinforce 2") + 1, "train", *settings, f"output={tmp_path}", "name=run")
    torn = tmp_path / "run" / "base" / "model.safetensors"
    whole = torn.read_bytes()
    torn.write_bytes(whole[: len(whole) // 2])
    run_to_end("train", "--resume", str(tmp_path / "run"))
    assert torn.read_bytes() == whole


@pytest.mark.integration
def test_a_base_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    run_to_end("train", *TINY, *REWARD, problems(tmp_path), "lora.rank=2", f"output={tmp_path}", "name=first")
    settings = [*TINY, *REWARD, problems(tmp_path), "lora.rank=2", f"model={tmp_path / 'first' / 'adapter'}", "warmup.steps=0"]
    changes = list_changes("train", *settings, f"output={tmp_path}", "name=whole")
    assert killed_at(changes.index("rename base") + 1, "train", *settings, f"output={tmp_path}", "name=run")
    assert not (tmp_path / "run" / "base").exists()
    run_to_end("train", "--resume", str(tmp_path / "run"))
    assert_is_the_run(tmp_path / "run", tmp_path / "whole")


def test_lines_of_a_repeated_evaluation_are_removed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    lines = [
        {"step": 4, "phase": "warm_up", "train/loss": 1},
        {"step": 1, "phase": "reinforce", "train/loss": 1},
        {"step": 1, "phase": "reinforce", "eval/a": 1},
        {"step": 2, "phase": "reinforce", "train/loss": 2, "eval/a": 1},
        {"step": 2, "phase": "reinforce", "eval/a": 2},
        {"step": 3, "phase": "reinforce", "train/loss": 3},
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    for evaluated, kept in ((True, 5), (False, 4)):
        directory.metrics.write_text(text + '{"step": 3, "pha')
        assert directory.cut_metrics("reinforce", 2, evaluated=evaluated) == 1
        assert metrics_of(tmp_path) == lines[:kept]


def test_a_run_that_lost_the_line_of_a_step_still_gets_a_report(whole: Path, tmp_path: Path) -> None:
    """As an earlier version left it: an evaluation of step 2 without the step itself."""
    import shutil

    run = tmp_path / "run"
    shutil.copytree(whole, run)
    kept = [line for line in metrics_of(run) if (line["phase"], line["step"]) != ("reinforce", 2) or "train/loss" not in line]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    (run / "summary.json").unlink()
    assert exit_status("train", "--resume", str(run)) == 0
    assert summary_of(run)["steps"] == 3


PROMPT_TOKENS, PROMPTS, GROUP = 700, 2, 8
SHARING = [
    *(
        "threads=1",
        "warmup.steps=1",
        "warmup.batch_size=2",
        "steps=3",
        f"rollout.prompts={PROMPTS}",
        f"rollout.group_size={GROUP}",
        "rollout.log_every=1",
    ),
    *("evaluation.prompts=3", "evaluation.samples_per_prompt=2", *NETWORK, *REWARD, "trainer.max_seq_len=720"),
    *("trainer.micro_token_budget=2000", "trainer.prefix_sharing=auto", "trainer.lr=0.01", "checkpoint.every_n_steps=1"),
]


def long_problems(folder: Path) -> str:
    path = folder / "rows.jsonl"
    rows = [{"prompt": f"{n:0{PROMPT_TOKENS - 1}d}>", "completion": f"{n:03d}"} for n in range(30)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return f"data={path}"


@pytest.mark.parametrize("moment", ["line reinforce 1", "line reinforce 3"])
def test_a_killed_run_on_shared_prompts_resumes_to_the_uninterrupted_run(
    whole_with_shared_prompts: Path, tmp_path: Path, moment: str
) -> None:
    assert killed_at(moment, "train", *SHARING, long_problems(tmp_path), f"output={tmp_path}", "name=run")
    run_to_end("train", "--resume", str(tmp_path / "run"))
    assert_is_the_run(tmp_path / "run", whole_with_shared_prompts)


@pytest.fixture(scope="module")
def whole_with_shared_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both share 14 * 700 of 16 * 700 tokens, and the sampler does from 4,096 on."""
    parent = tmp_path_factory.mktemp("whole")
    run_to_end("train", *SHARING, long_problems(parent), f"output={parent}", "name=run")
    shared = [
        line["perf/shared_tokens"] for line in metrics_of(parent / "run") if line["phase"] == "reinforce" and "train/loss" in line
    ]
    assert len(shared) == 3
    assert min(shared) >= (PROMPTS * GROUP - PROMPTS) * PROMPT_TOKENS > 4096
    return parent / "run"


@pytest.mark.integration
@pytest.mark.parametrize("tower", ["trained", "frozen"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_a_run_with_images_killed_twice_at_random_resumes_to_the_uninterrupted_run(tmp_path: Path, tower: str, seed: int) -> None:
    settings = [*SHAPES, f"images.tower={tower}", "checkpoint.every_n_steps=2", "checkpoint.max_to_keep=1", "trainer.lr=3e-3"]
    changes = list_changes("train", *settings, f"output={tmp_path}", "name=whole")
    whole, run, rng = tmp_path / "whole", tmp_path / "run", random.Random(seed)
    moment = rng.randrange(changes.index("line reinforce 1") + 1, len(changes))
    assert killed_at(moment, "train", *settings, f"output={tmp_path}", "name=run")
    killed_at(rng.randrange(1, len(changes) - moment + 1), "train", "--resume", str(run))
    run_to_end("train", "--resume", str(run))
    assert_is_the_run(run, whole)
    store = ImageStore(run / "images")
    for path in (whole / "images").glob("*/*"):
        assert store.read(path.stem) == path.read_bytes()
    shown = set(re.findall(r"ludic-image:(\w+)", (run / "rollouts.jsonl").read_text()))
    assert len(shown) > 5
    store.check(shown)
