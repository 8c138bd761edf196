"""The code of docs/rollouts.md runs as printed, and the names and settings on it exist."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml
from stub_vllm import StubVLLM

from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.recipes.compose import compose
from ludic.rollouts.training import DataBuffer, RolloutConfig, Sample, SampleStatus
from ludic.rollouts.training.pipeline import read_tree
from ludic.rollouts.training.rollout_gen import generate_rollout_batch
from ludic.training.rollouts.member_calls import seed_of_member

PAGE = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_code_of_the_page_runs() -> None:
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(block, names)


async def test_the_function_that_asks_a_server_of_the_page_gives_its_ids_and_log_probabilities() -> None:
    """A stub of a vLLM server: what it samples follows from the prompt and the seed."""
    names: dict[str, object] = {"Tokenizer": make_byte_tokenizer, "Sample": Sample}
    encode = make_byte_tokenizer().encode
    with StubVLLM(model="MODEL") as server:
        block = blocks("py")[0].replace("http://127.0.0.1:8000", f"http://127.0.0.1:{server.port}")
        block = block.replace('AutoTokenizer.from_pretrained("MODEL")', "Tokenizer()")
        exec(block, names)
        config = RolloutConfig(2, n_samples_per_prompt=2, generate_fn=names["generate"], seed=5)  # type: ignore[arg-type]
        rows = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "3+5=", "answer": "8"}]
        batch = await generate_rollout_batch(DataBuffer(rows), config, lambda sample: 1.0)
        await names["client"].close()  # type: ignore[attr-defined]
        expected = [
            server.sample(encode(row["prompt"]), max_tokens=256, seed=seed_of_member(5, group, member))
            for group, row in enumerate(rows)
            for member in range(2)
        ]
    for sample, row, (ids, logprobs, finish, _) in zip(batch.samples, [r for r in rows for _ in range(2)], expected, strict=True):
        prompt = len(encode(row["prompt"]))
        assert sample.tokens == encode(row["prompt"]) + ids
        assert sample.loss_mask == [0] * prompt + [1] * len(ids)
        assert sample.rollout_log_probs == pytest.approx([0.0] * prompt + logprobs)
        assert sample.response == make_byte_tokenizer().decode(ids, skip_special_tokens=True)
        assert sample.status is (SampleStatus.TRUNCATED if finish == "length" else SampleStatus.COMPLETED)
    assert sum(len(ids) for ids, *_ in expected) > 0


@pytest.mark.integration
async def test_the_training_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_policy import save_tiny_policy

    save_tiny_policy(tmp_path / "MODEL")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"engines": []}
    first, _, losses, *_ = blocks("python")
    exec(first[: first.index("async def two_batches")], names)
    exec(losses, names)
    training = blocks("py")[-2]
    await eval(compile(training, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    assert [line["step"] for line in names["metrics"]] == [1, 2]  # type: ignore[attr-defined]
    assert (tmp_path / "checkpoints" / "step_000002").is_dir()


def test_what_the_page_imports_exists() -> None:
    block = blocks("py")[-1]
    tree = compile(block, "page", "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    [statement] = [node for node in tree.body if isinstance(node, ast.ImportFrom)]  # type: ignore[attr-defined]
    module = importlib.import_module(str(statement.module))
    assert all(hasattr(module, alias.name) for alias in statement.names)


def test_the_tree_of_the_page_is_read(caplog: pytest.LogCaptureFixture) -> None:
    [block] = blocks("yaml")
    assert read_tree(yaml.safe_load(block))["output"]["mode"] == "sft+rl"
    assert not caplog.records


def test_the_command_of_the_page_is_a_recipe() -> None:
    [block] = blocks("bash")
    recipe = compose(shlex.split(block)[2:])
    assert (recipe.warmup.data, recipe.steps > 0) == ("chats.jsonl", True)
    for mode in re.findall(r"`mode=([a-z+]+)`", PAGE):
        assert compose([f"mode={mode}"]).mode == mode


def test_the_new_names_exist() -> None:
    table = PAGE.split("## Names")[1].split("## Compared with")[0]
    modules = {name for name in re.findall(r"`(ludic\.[a-z_.]+)`", table) if name != "ludic."}
    assert len(modules) > 8
    for name in modules:
        importlib.import_module(name)


def test_each_source_of_the_comparison_is_listed() -> None:
    table, sources = PAGE.split("## Compared with")[1].split("\n1. ")
    used = {int(number) for number in re.findall(r"\[(\d+)\]", table)}
    listed = {1, *(int(number) for number in re.findall(r"^(\d+)\. ", sources, re.MULTILINE))}
    assert used == listed
