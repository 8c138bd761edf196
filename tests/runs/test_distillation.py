"""Distillation by the command: who may teach, and what a run learns."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_recipe import TINY
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.recipes.compose import compose
from ludic.recipes.model import make_small_model

SIZES = ["hidden_size=16", "num_heads=2", "num_kv_heads=1", "intermediate_size=16"]


def train(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", "sort", *TINY, *arguments])


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(1)
    sizes = [f"network.{size}" for size in (*SIZES, "initializer_range=0.3")]
    make_small_model(compose(sizes).network).save_pretrained(path)
    make_byte_tokenizer().save_pretrained(path)
    return path


def test_a_run_measures_its_distance_from_the_teacher_and_leaves_it_as_it_is(tmp_path: Path, teacher: Path) -> None:
    before = {path.name: path.read_bytes() for path in teacher.iterdir()}
    done = train(f"output={tmp_path}", "name=run", "algorithm=opd", f"teacher={teacher}")
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    kl = [line["reference/kl"] for line in lines if line["phase"] == "reinforce"]
    assert len(kl) == 3
    assert min(kl) > 0.1
    assert {path.name: path.read_bytes() for path in teacher.iterdir()} == before
    assert not (tmp_path / "run" / "reference").exists()


def test_a_column_of_the_data_names_the_teacher_of_a_row(tmp_path: Path, teacher: Path) -> None:
    """The policy is the teacher `b`."""
    uniform = tmp_path / "uniform"
    make_small_model(compose([f"network.{size}" for size in (*SIZES, "initializer_range=0")]).network).save_pretrained(uniform)
    make_byte_tokenizer().save_pretrained(uniform)
    kl = {}
    for name in "ab":
        rows = [{"prompt": f"{number}=", "answer": f"#### {number}", "subject": name} for number in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        settings = [
            *("task.kind=data", f"data={tmp_path / name}.jsonl", "reward=gsm8k", f"model={uniform}", "warmup.steps=0", "steps=1"),
            *("algorithm=opd", f"teacher.model={{a: {teacher}, b: {uniform}}}", "teacher.column=subject"),
            "rollout.max_new_tokens=8",
        ]
        done = train(f"output={tmp_path}", f"name=run-{name}", *settings)
        assert done.exit_code == 0, done.output
        [line] = [json.loads(line) for line in (tmp_path / f"run-{name}" / "metrics.jsonl").read_text().splitlines()]
        kl[name] = line["reference/kl"]
    assert kl["a"] > 0.1
    assert abs(kl["b"]) < 1e-6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm=opd"], "set teacher.model=FOLDER"),
        (["algorithm=opd", "teacher=./nowhere"], "teacher.model (./nowhere) does not exist"),
        (["algorithm=opd", "teacher=OTHER"], "must have the policy's vocabulary"),
        (["algorithm=grpo", "teacher=TEACHER"], "is not read by algorithm (grpo); set algorithm=opd"),
        (["algorithm=opd", "teacher.model={a: TEACHER, b: OTHER}"], "OTHER) must have the policy's vocabulary"),
        (["algorithm=opd", "teacher.model.a=./nowhere"], "teacher.model (./nowhere) does not exist"),
        (["algorithm=opd", "teacher.column=subject"], "needs teacher.model or teacher.url"),
        (
            ["algorithm=opd", "algorithm_args.divergence=jsd", "teacher.model={a: TEACHER}"],
            "reads the logits of one model, not of teacher (TEACHER); set",
        ),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_before_anything_is_written(
    tmp_path: Path, teacher: Path, settings: list[str], message: str
) -> None:
    other = tmp_path / "other"
    make_small_model(compose([f"network.{size}" for size in SIZES]).network).save_pretrained(other)
    tokenizer = make_byte_tokenizer()
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())
    tokenizer.save_pretrained(other)
    (first, one), (second, two), *_ = [pair for pair in vocabulary["model"]["vocab"].items() if pair[1] > 100]
    vocabulary["model"]["vocab"] |= {first: two, second: one}
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    *given, message = [each.replace("OTHER", str(other)).replace("TEACHER", str(teacher)) for each in (*settings, message)]
    done = train(f"output={tmp_path}", "name=run", *given)
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())
    assert not (tmp_path / "run").exists()
