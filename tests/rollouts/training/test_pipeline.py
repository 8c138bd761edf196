"""A pipeline: the configuration tree becomes settings of ludic, checkpoints are found by number,
and SFT hands its weights to RL."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from commands import metrics_of, summary_of

import ludic.rollouts.alias  # noqa: F401  # binds the name rollouts
from ludic.errors import CheckpointError, ConfigError, DataError, LaunchError
from ludic.recipes.compose import compose
from ludic.recipes.epochs_schema import compose_sft
from ludic.rollouts.training import pipeline
from ludic.rollouts.training.pipeline import (
    Translation,
    latest_checkpoint,
    make_rl_row,
    make_sft_row,
    read_tree,
    run_pipeline,
    run_rl,
    run_sft,
    translate_rl,
    translate_sft,
)


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, dict[str, object]]:
    """A tree of tiny data; the model is to be filled in."""
    chats = write_rows(tmp_path / "chats.jsonl", [{"prompt": f"{n}>", "completion": f"{n % 7}"} for n in range(10)])
    problems = write_rows(tmp_path / "problems.jsonl", [{"question": f"{n}>", "answer": str(n % 7)} for n in range(20)])
    return {
        "model": {"name": "somewhere", "dtype": "float32"},
        "data": {
            "sft_mixture": [{"filepath": str(chats), "repeat": 2}, {"filepath": str(chats), "max_samples": 3}],
            "rl_mixture": [{"filepath": str(problems)}],
            "max_length": 64,
        },
        "sft": {"target_examples_per_step": 8, "checkpoint_every": 2, "matrix_lr": 1e-3},
        "rl": {"examples_per_step": 4, "num_samples": 2, "max_new_tokens": 4, "reward": "byte_rewards:mean_id", "save_every": 3},
        "output": {"mode": "sft+rl", "experiment_name": "first", "save_dir": str(tmp_path / "results")},
    }


def composed(translation: Translation, tmp_path: Path, read: object = compose) -> object:
    path = tmp_path / "translated.yaml"
    path.write_text(json.dumps(translation.recipe))
    return read([str(path)])  # type: ignore[operator]


def test_the_tree_becomes_one_recipe(tree: dict[str, dict[str, object]], tmp_path: Path) -> None:
    translation = translate_rl(read_tree(tree), tmp_path, mode="sft+rl")
    recipe = composed(translation, tmp_path)
    assert (recipe.mode, recipe.model, recipe.seed, recipe.algorithm) == ("sft+rl", "somewhere", 42, "grpo")
    assert (recipe.warmup.epochs, recipe.warmup.batch_size, recipe.warmup.trainer.lr) == (1, 8, 1e-3)
    assert (recipe.steps, recipe.rollout.prompts, recipe.rollout.group_size) == (5, 4, 2)  # 20 problems, 4 a step
    assert recipe.checkpoint.every_n_steps == 2
    assert recipe.trainer.lr == 5e-6  # not given: that of a loaded model
    assert (recipe.trainer.lr_scheduler_type, recipe.trainer.warmup_ratio, recipe.trainer.max_seq_len) == ("cosine", 0.03, 64)
    assert recipe.sharding.kind == "none"
    assert len(translation.rows[recipe.warmup.data]) == 2 * 10 + 3
    assert translation.rows[recipe.data][8] == {"question": "8>", "prompt": "8>", "answer": "1"}


def test_the_tree_becomes_a_recipe_of_supervised_training(tree: dict[str, dict[str, object]], tmp_path: Path) -> None:
    tree["sft"] |= {"num_iterations": 7, "lr_decay_style": "constant"}
    recipe = composed(translate_sft(read_tree(tree), tmp_path), tmp_path, compose_sft)
    assert (recipe.steps, recipe.batch_size, recipe.checkpoint.every_n_steps, recipe.trainer.lr) == (7, 8, 2, 1e-3)
    assert recipe.trainer.lr_scheduler_type == "constant_with_warmup"


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("modle", {"name": "x"}, "no section 'modle'; did you mean model"),
        ("rl", {"num_sample": 3}, "rl 'num_sample'; did you mean num_samples"),
        ("data", {"rl_mixture": [{"nmae": "x"}]}, r"data\.rl_mixture 'nmae'; did you mean name"),
        ("data", {"sft_mixture": []}, "data.sft_mixture is empty"),
        ("data", {"rl_mixture": [{"subset": "main"}]}, "has neither filepath nor name"),
        ("output", {"mode": "rl+sft"}, r"output.mode .rl.sft. .*sft, rl, sft.rl"),
        ("model", {"compile": True}, "model.compile is not supported"),
        ("model", {"name": None}, "model.name is missing"),
        ("model", "somewhere", "must be a mapping"),
        ("target", {"gpu_ranks": [0, 1]}, "2 GPUs, .*train_backend=pytorch .*set it to fsdp"),
        ("target", {"gpu_ranks": []}, "list of the numbers of GPUs"),
        ("target", {"train_backend": "ddp"}, "must be pytorch or fsdp"),
        ("rl", {"reward": None}, "rl.reward is missing"),
    ],
)
def test_what_is_wrong_in_a_tree_is_named(
    tree: dict[str, dict[str, object]], tmp_path: Path, section: str, change: object, message: str
) -> None:
    wrong = {**tree, section: {**tree.get(section, {}), **change} if isinstance(change, dict) else change}
    with pytest.raises(ConfigError, match=message):
        translate_rl(read_tree(wrong), tmp_path, mode="sft+rl")


def test_what_has_no_counterpart_is_named_in_a_warning(
    tree: dict[str, dict[str, object]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        read_tree({**tree, "rl": {**tree["rl"], "top_k": 50, "baseline": 0.0}})
    assert "rl.top_k (50) is not followed" in caplog.text
    assert "baseline" not in caplog.text  # its default


def test_rows_of_public_data_sets_are_read() -> None:
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    assert make_sft_row({"question": "q", "answer": "a"}, "row 1") == chat
    assert make_sft_row({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "row 1") == chat
    with_input = make_sft_row({"instruction": "add", "input": "1 2", "output": "3"}, "row 1")
    assert with_input["messages"][0]["content"] == "add\n\n1 2"
    assert make_sft_row({"prompt": "q", "completion": "a"}, "row 1") == {"prompt": "q", "completion": "a"}
    with pytest.raises(DataError, match="row 7 has the keys title"):
        make_sft_row({"title": "q"}, "row 7")
    assert make_rl_row({"question": "q", "solution": "a"}, "row 1")["prompt"] == "q"
    assert make_rl_row(chat, "row 1")["prompt"] == [{"role": "user", "content": "q"}]
    with pytest.raises(DataError, match="row 7 has the keys title"):
        make_rl_row({"title": "q"}, "row 7")


def make_checkpoint(folder: Path, file: str | None = "metadata.json") -> Path:
    folder.mkdir(parents=True)
    if file is not None:
        (folder / file).write_text("{}")
    return folder


def test_the_latest_checkpoint_is_the_one_of_the_highest_number_that_is_complete(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        latest_checkpoint(tmp_path)
    make_checkpoint(tmp_path / "step_11", None)
    with pytest.raises(CheckpointError, match="step_11 were not written to their end"):
        latest_checkpoint(tmp_path)
    for step in ("9", "0010", "2"):
        make_checkpoint(tmp_path / f"step_{step}")
    make_checkpoint(tmp_path / "step_12_old")
    assert latest_checkpoint(tmp_path).name == "step_0010"
    make_checkpoint(tmp_path / "run" / "checkpoints" / "step_10000", "manifest.json")
    assert latest_checkpoint(tmp_path / "run").name == "step_10000"
    for phase, step in (("warm_up", 500), ("reinforce", 120)):
        make_checkpoint(tmp_path / "both" / "checkpoints" / phase / f"step_{step:06d}", "manifest.json")
    assert latest_checkpoint(tmp_path / "both").name == "step_000120"
    output_dir = tmp_path / "output_dir"
    sft = make_checkpoint(output_dir / "sft" / "checkpoints" / "step_000500", "manifest.json")
    assert latest_checkpoint(output_dir) == sft
    rl = make_checkpoint(output_dir / "rl" / "checkpoints" / "step_000005", "manifest.json")
    assert latest_checkpoint(output_dir) == rl


def test_pickled_checkpoints_are_refused_with_the_remedy(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "step_9")
    path = make_checkpoint(tmp_path / "step_10")
    (path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step_10 has pickled weights.*save_pretrained"):
        latest_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="pickled weights"):
        pipeline._find_model(path)


async def test_several_gpus_are_ranks_of_torchrun(
    tree: dict[str, dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    async def execute(command: list[str], environment: dict[str, str]) -> int:
        started.append((command, environment))
        return 0

    monkeypatch.setattr(pipeline, "_execute", execute)
    monkeypatch.delenv("RANK", raising=False)
    target = {"gpu_ranks": [1, 3], "train_backend": "fsdp", "master_port": 29511}
    tree |= {"target": target, "output": {**tree["output"], "wandb_project": "mine"}}
    run = await run_pipeline(tree)
    assert run == tmp_path / "results" / "first" / "sft+rl"
    command, environment = started[0]
    assert "--nproc-per-node=2" in command
    assert "--master-port=29511" in command
    assert command[-2:] == ["train", str(tmp_path / "results" / "first" / "sft+rl.yaml")]
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["WANDB_PROJECT"]) == ("1,3", "mine")
    assert compose([command[-1]]).sharding.kind == "full"
    run.mkdir()
    (run / "progress.json").write_text("{}")
    await run_pipeline(tree)
    assert started[1][0][-2:] == ["--resume", str(run)]
    monkeypatch.setenv("RANK", "0")
    await run_pipeline(tree)
    assert started[2][0][1:4] == ["-m", "ludic.cli", "train"]


async def test_a_run_that_has_begun_goes_on_with_its_own_tree_only(
    tree: dict[str, dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    async def execute(command: list[str], _: object) -> int:
        started.append(command[-2:])
        return 0

    monkeypatch.setattr(pipeline, "_execute", execute)
    run = await run_pipeline({**tree, "sft": {**tree["sft"], "matrix_lr": 0.5}})
    assert run == await run_pipeline(tree)  # nothing has begun yet
    make_checkpoint(run, "progress.json")
    files = [run.with_suffix(".yaml"), *(run.parent / "data").iterdir()]
    before = [file.read_bytes() for file in files]
    assert len(before) == 3
    await run_pipeline(tree)
    assert started[2] == ["--resume", str(run)]
    other = write_rows(tmp_path / "other.jsonl", [{"prompt": f"{n}>", "completion": "0"} for n in range(23)])
    rates = {"sft": {**tree["sft"], "matrix_lr": 2e-3}, "rl": {**tree["rl"], "weight_decay": 0.1}}
    with pytest.raises(ConfigError) as error:
        await run_pipeline({**tree, **rates})
    named = re.findall(r"([a-z_.]+) \((\S+), now (\S+)\)", str(error.value))
    assert named == [("trainer.weight_decay", "0.0", "0.1"), ("warmup.trainer.lr", "0.001", "0.002")]
    with pytest.raises(ConfigError, match=r"other settings: .*data/sft\.jsonl; put them back"):
        await run_pipeline({**tree, "data": {**tree["data"], "sft_mixture": [{"filepath": str(other)}]}})
    assert [file.read_bytes() for file in files] == before
    assert len(started) == 3
    files[0].unlink()
    with pytest.raises(ConfigError, match="with its settings is gone"):
        await run_pipeline(tree)


async def test_reinforcement_resumes_when_it_is_given_its_own_checkpoint(
    tree: dict[str, dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`latest_checkpoint(output_dir)` is one of the run itself once it has begun."""
    started = []

    async def execute(command: list[str], _: object) -> int:
        started.append(command[-2])
        return 0

    monkeypatch.setattr(pipeline, "_execute", execute)
    out, sources = tmp_path / "out", [tmp_path / name / "step_1" for name in ("first", "second")]
    for source in sources:
        make_checkpoint(source, "config.json")
    run = await run_rl(tree, out, sources[0])
    make_checkpoint(run, "progress.json")
    await run_rl(tree, out, make_checkpoint(run / "checkpoints" / "reinforce" / "step_000003", "config.json"))
    assert started[1] == "--resume"
    with pytest.raises(ConfigError, match="second"):
        await run_rl(tree, out, sources[1])


async def test_a_run_that_fails_is_an_error(
    tree: dict[str, dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def execute(*_: object) -> int:
        return 3

    monkeypatch.setattr(pipeline, "_execute", execute)
    with pytest.raises(LaunchError, match=r"`ludic sft` ended with status 3.*--resume"):
        await run_sft(tree, tmp_path / "out")


@pytest.fixture
def model(tmp_path: Path) -> str:
    from ludic.models.byte_tokenizer import make_byte_tokenizer
    from ludic.recipes.model import make_small_model

    sizes = ["hidden_size=16", "num_heads=2", "num_kv_heads=1", "intermediate_size=16"]
    torch.manual_seed(0)
    make_small_model(compose([f"network.{size}" for size in sizes]).network).save_pretrained(tmp_path / "model")
    make_byte_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.integration
async def test_sft_then_rl(
    tree: dict[str, dict[str, object]], tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick reference's own steps. Its `sorted(folder / "step_*")[-1]` is no Python, and would
    compare names as text: `latest_checkpoint` is in its place."""
    from rollouts.training.pipeline import latest_checkpoint, run_pipeline, run_rl, run_sft
    from safetensors.torch import load_file

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support"))
    tree["model"]["name"] = model
    config, output_dir, mode = tmp_path / "tree.yaml", tmp_path / "out", tree["output"]["mode"]
    config.write_text(json.dumps(tree))
    if mode == "sft+rl":
        # Step 1: SFT Training
        await run_sft(config, output_dir)

        # Step 2: Find latest checkpoint
        latest_ckpt = latest_checkpoint(output_dir)

        # Step 3: RL Training from that checkpoint
        run = await run_rl(config, output_dir, latest_ckpt)

    assert latest_ckpt == output_dir / "sft" / "checkpoints" / "step_000003"  # 23 rows, 8 a step; the last step is saved
    assert summary_of(run)["steps"] == 5
    assert {line["phase"] for line in metrics_of(run)} == {"reinforce"}
    first = load_file(latest_ckpt / "model.safetensors")
    trained = load_file(run / "model" / "model.safetensors")
    assert first.keys() == trained.keys()
    assert latest_checkpoint(output_dir).is_relative_to(run)
    both = await run_pipeline(config)
    assert {line["phase"] for line in metrics_of(both)} == {"warm_up", "reinforce"}
