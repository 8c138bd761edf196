"""`ludic train`, `sft` and `train-rm` with `sharding=full` on two ranks: the run of one process,
measured and saved with the trained weights, and resumed on as many ranks and on one."""

import json
import shutil
import signal
from functools import cache
from pathlib import Path

import pytest
import torch
from graded_shapes import SETTINGS as SHAPES
from ranked_commands import (
    NETWORK,
    PAIRS,
    REWARD,
    Ranks,
    alone,
    copied_before_step_3,
    in_slices,
    killed_before_step_4,
    largest_difference,
    ludic_command,
    metrics_of,
    with_sgd,
)
from safetensors.torch import load_file
from small_models import mixture_model
from tiny_recipe import TINY
from transformers import AutoModelForCausalLM

from ludic.files.checkpoints import find_checkpoint_faults
from ludic.models.byte_tokenizer import make_byte_tokenizer

pytestmark = pytest.mark.integration

SFT = [*NETWORK, "threads=1", "rows=40", "batch_size=6", "epochs=1", "heldout=0.1", "checkpoint.max_to_keep=9"]
EVALUATED = ["trainer.eval_every_n_steps=2", "checkpoint.every_n_steps=2"]
PPO = ["algorithm=ppo", "algorithm_args.lam=0.9", "algorithm_args.critic_lr=0.1"]
STOPPED = ["trainer.early_stopping_patience=9", "trainer.early_stopping_metric=loss", "trainer.early_stopping_mode=min"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with prompts."""
    place = tmp_path_factory.mktemp("sharded")
    lines = [json.dumps({"prompt": f"{number}+{number % 7}=", "completion": str(number)}) for number in range(24)]
    (place / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return place


def run_command(folder: Path, name: str, *arguments: str, world_size=2, work=with_sgd):
    """`ludic ARGUMENTS...` to its end. Returns the run's folder."""
    given = arguments if "--resume" in arguments else [*arguments, f"output={folder}", f"name={name}"]
    with Ranks(folder / f"{name}-log", world_size, *given, work=work) as run:
        assert run.wait() == [0] * world_size, run.read_all()
    return folder / name


def settings_of(kind: str, folder: Path) -> list[str]:
    own = ["train", *TINY, *REWARD, f"data={folder / 'prompts.jsonl'}", "rollout.prompts=3", "trainer.minibatches_per_batch=2"]
    return {
        "train": [*own, *EVALUATED],
        "train, a reference": [*own, "algorithm_args.reference_kl=0.1"],
        "train, a value head": [*own, *PPO],
        "train, a critic": [*own, *PPO, "critic.model=policy", "lora.rank=2"],
        "train, adapters, a batch ahead": [*own, "lora.rank=2", "inference.batches_ahead=1"],
        "train, images": ["train", *SHAPES, "trainer.minibatches_per_batch=2", *EVALUATED],
        "sft": ["sft", *SFT, *EVALUATED, *STOPPED],
        "train-rm": ["train-rm", *PAIRS],
    }[kind]


def summary_of(run: Path):
    return json.loads((run / "progress.json").read_text())


@pytest.fixture(scope="module")
def whole_runs(folder):
    """Kind of a run -> the run of one process, which is made once."""

    @cache
    def run_alone(kind):
        return run_command(folder, f"{shorten(kind)}-whole", *settings_of(kind, folder), world_size=1, work=alone)

    return run_alone


def shorten(kind):
    return kind.replace(", ", "-").replace(" ", "-")


@pytest.fixture(scope="module")
def sharded_sft(folder):
    return run_command(folder, "sft-sharded", *settings_of("sft", folder), "sharding=full")


@pytest.mark.parametrize(
    "kind",
    [
        *("train", "train, a reference", "train, a value head", "train, a critic", "train, adapters, a batch ahead"),
        *("train, images", "sft", "train-rm"),
    ],
)
def test_a_sharded_run_is_that_of_one_process(kind, folder, whole_runs, request):
    if kind == "sft":
        sharded = request.getfixturevalue("sharded_sft")
    else:
        sharded = run_command(folder, f"{shorten(kind)}-sharded", *settings_of(kind, folder), "sharding.kind=full")
    assert_same_run(whole_runs(kind), sharded, kind)


CONTEXT = ["sharding.kind=full", "sharding.context=2"]


@pytest.fixture(scope="module")
def sft_of_slices(folder):
    return run_command(folder, "sft-slices", *settings_of("sft", folder), *CONTEXT, work=in_slices)


@pytest.mark.parametrize("kind", ["train", "train, a critic", "train, adapters, a batch ahead", "sft", "train-rm"])
def test_a_run_whose_ranks_compute_slices_of_rows_is_that_of_one_process(kind, folder, whole_runs, request):
    if kind == "sft":
        run = request.getfixturevalue("sft_of_slices")
    else:
        run = run_command(folder, f"{shorten(kind)}-slices", *settings_of(kind, folder), *CONTEXT, work=in_slices)
    assert_same_run(whole_runs(kind), run, kind)


def test_slices_of_rows_are_killed_and_resume_on_other_ranks(folder, sft_of_slices):
    """Bit for bit on as many; on ranks with rows of their own, and on one process."""
    name = "sft-slices-killed"
    arguments = [*settings_of("sft", folder), *CONTEXT, f"output={folder}", f"name={name}"]
    with Ranks(folder / "log-slices-killed", 2, *arguments, work=killed_before_step_4) as run:
        assert run.wait() == [75, -signal.SIGKILL], run.read_all()
    killed = folder / name
    copies = [shutil.copytree(killed, folder / f"{name}-{way}") for way in ("alone", "rows")]
    run_command(folder, name, "sft", "--resume", str(killed))
    assert largest_difference(killed, sft_of_slices) == 0.0
    run_command(folder, copies[0].name, "sft", "--resume", str(copies[0]), world_size=1, work=alone)
    run_command(folder, copies[1].name, "sft", "--resume", str(copies[1]), "sharding.context=1")
    for copy in copies:
        assert largest_difference(copy, sft_of_slices) < 1e-6


def test_images_and_heads_that_do_not_divide_are_refused_with_a_line(folder):
    odd = ["network.num_heads=1", "network.num_kv_heads=1"]
    cases = {
        "images": (["train", *SHAPES, *CONTEXT], "samples with images are computed whole; set sharding.context (2) to 1"),
        "heads": ([*settings_of("sft", folder), *odd, *CONTEXT], "1 attention heads cannot be divided among 2 ranks"),
    }
    for name, (arguments, line) in cases.items():
        with Ranks(folder / f"refused-{name}", 2, *arguments, f"output={folder}", f"name=no-{name}", work=ludic_command) as run:
            codes = run.wait()
            assert line in run.read(0, "err").replace("\n", " "), (codes, run.read_all())
            assert codes[0] != 0


def assert_same_run(whole, sharded, kind):
    assert largest_difference(whole, sharded) < 1e-6
    one, two = metrics_of(whole), metrics_of(sharded)
    assert [(line["phase"], line["step"]) for line in one] == [(line["phase"], line["step"]) for line in two]
    for before, after in zip(one, two, strict=True):
        for key in ("train/loss", "train/grad_norm", "eval/loss", "eval/sampled_reward"):
            assert (key in after) == (key in before), key
            assert key not in before or after[key] == pytest.approx(before[key], rel=1e-4, abs=1e-6), key
    assert_same_measurements(summary_of(whole), summary_of(sharded), kind)
    checkpoint = sorted(sharded.glob("checkpoints/**/step_*"))[-1]
    assert len(list(checkpoint.glob("optimizer-*-of-00002.safetensors"))) == 2  # each rank wrote its part
    assert find_checkpoint_faults(checkpoint) == []
    with_whole = {path.name for path in whole.iterdir()}
    assert {path.name for path in sharded.iterdir()} == with_whole | {"ranks", ".launcher"}


def assert_same_measurements(whole, sharded, kind):
    """Before and after training; training changed what is measured."""
    for when in ("before", "after"):
        for key in ("loss", "sampled_reward", "eval_loss"):
            values = [(measured[when] or {}).get(key) for measured in (whole, sharded)]
            assert values[0] == values[1] or values[1] == pytest.approx(values[0], rel=1e-5), (when, key)
    if kind == "sft":
        assert sharded["after"]["loss"] < sharded["before"]["loss"] - 0.01
        assert sharded["early_stopping"]["best"] == pytest.approx(whole["early_stopping"]["best"], rel=1e-5)


def test_a_sharded_run_that_is_killed_resumes_on_as_many_ranks_and_on_one(folder, sharded_sft):
    name = "sft-killed"
    with Ranks(
        folder / "log-killed",
        2,
        *settings_of("sft", folder),
        "sharding=full",
        f"output={folder}",
        f"name={name}",
        work=killed_before_step_4,
    ) as run:
        assert run.wait() == [75, -signal.SIGKILL], run.read_all()
    killed, copy = folder / name, folder / "sft-on-one"
    shutil.copytree(killed, copy)
    run_command(folder, name, "sft", "--resume", str(killed))
    assert largest_difference(killed, sharded_sft) == 0.0
    run_command(folder, copy.name, "sft", "--resume", str(copy), world_size=1, work=alone)
    assert largest_difference(copy, sharded_sft) < 1e-6
    for resumed in (killed, copy):
        steps = [line["step"] for line in metrics_of(resumed) if "train/loss" in line]
        assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize(("param_dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-3)])
def test_a_run_with_param_dtype_goes_on_on_one_process(param_dtype, tolerance, folder):
    """Two more steps, relative to the largest weight. What bfloat16 rounds depends on the samples
    of a rank."""
    name, given = f"sft-{param_dtype}", ["dtype=bfloat16", "sharding=full", f"sharding.param_dtype={param_dtype}"]
    sharded = run_command(folder, name, "sft", *SFT, *given, "checkpoint.every_n_steps=2", "steps=4", work=copied_before_step_3)
    copy = folder / f"{name}-at-2"
    run_command(folder, copy.name, "sft", "--resume", str(copy), world_size=1, work=alone)
    before, expected, got = (stored_weights(run, step) for run, step in ((sharded, 2), (sharded, 4), (copy, 4)))
    assert {tensor.dtype for tensor in got.values()} == {torch.float32}
    assert distance(got, expected) < tolerance
    assert distance(before, expected) > 5 * tolerance


def stored_weights(run: Path, step: int):
    """The weights of a checkpoint, by name."""
    [folder] = run.glob(f"checkpoints/**/step_{step:06}")
    return {key: tensor for path in folder.glob("model*.safetensors") for key, tensor in load_file(path).items()}


def distance(first, second):
    """Of weights by name, relative to the largest one."""
    assert first.keys() == second.keys()
    largest = max(float(tensor.abs().max()) for tensor in second.values())
    return max(float((first[name] - second[name]).abs().max()) for name in second) / largest


def test_a_mixture_of_experts_keeps_the_stored_biases_of_its_files(folder):
    """Ranks above 0 build it from its config, which has no biases."""
    mixture_model("DeepseekV3", vocab_size=300).save_pretrained(folder / "mixture")
    make_byte_tokenizer().save_pretrained(folder / "mixture")
    lines = "".join(f'{{"prompt": "{number}+1=", "completion": "{number + 1}"}}\n' for number in range(8))
    (folder / "sums.jsonl").write_text(lines)
    given = ["sft", "threads=1", f"model={folder / 'mixture'}", f"data={folder / 'sums.jsonl'}", "batch_size=4", "epochs=1"]
    settings = [*given, "heldout=0", "checkpoint.every_n_steps=2"]
    whole = run_command(folder, "mixture-whole", *settings, world_size=1, work=alone)
    runs = [whole, run_command(folder, "mixture-sharded", *settings, "sharding=full")]
    assert largest_difference(*runs) < 1e-6
    one, other = (AutoModelForCausalLM.from_pretrained(next(run.glob("checkpoints/**/step_000002"))).state_dict() for run in runs)
    assert one.keys() == other.keys()
    for name, stored in one.items():
        torch.testing.assert_close(other[name], stored, rtol=0, atol=1e-6, msg=name)
    assert one["model.layers.1.mlp.gate.e_score_correction_bias"].tolist() == pytest.approx([0.3, -0.5, 0.1, 0.7])


def test_settings_that_would_sample_from_the_first_weights_leave_no_folder(folder):
    arguments = [*settings_of("train", folder), "sharding=full", "trainer.sync_every_steps=0", f"output={folder}", "name=refused"]
    with Ranks(folder / "refused-log", 2, *arguments, work=ludic_command) as run:
        assert run.wait() == [78, 78]
        assert "trainer.sync_every_steps (0) must be 1" in run.read(0, "err")
    assert not (folder / "refused").exists()
