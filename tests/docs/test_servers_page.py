"""The settings and commands of docs/servers.md exist, and its example of a fault report is what the
library prints."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from seeded_faults import byte_policy, client_of, sample_items, sampling
from training_samples import cpu_config
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.errors import MismatchError
from ludic.recipes.build import build_algorithm
from ludic.recipes.compose import compose
from ludic.recipes.processes import InferenceSection, choose_kind
from ludic.runs.sampler import HEAD_DIMS
from ludic.training import make_grpo
from ludic.training.backend.torch import TorchBackend
from ludic.training.loss.correction import CORRECTIONS
from ludic.training.preflight.check import Preflight

PAGE = (Path(__file__).parents[2] / "docs" / "servers.md").read_text(encoding="utf-8")


def commands():
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


def test_the_training_commands_of_the_page_are_recipes():
    shown = [command[command.index("train") + 1 :] for command in commands() if "train" in command]
    assert len(shown) == 13
    for arguments in shown:
        recipe = compose(arguments)
        assert choose_kind(recipe.inference) == (
            "local" if recipe.callbacks.guard.ess or recipe.rollout.keep_candidates else "vllm"
        )
        build_algorithm(recipe)


def test_the_other_commands_of_the_page_accept_their_options():
    for command in commands():
        if "ludic" not in command or command[0] == "docker":
            continue
        verb = command[command.index("ludic") + 1]
        shown = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"}).output
        own = command[: command.index("--")] if "--" in command else command  # what follows belongs to vLLM
        for option in (argument for argument in own if argument.startswith("--")):
            assert option in shown, (verb, option)


def test_the_page_has_exactly_the_settings_of_the_section():
    named = set(re.findall(r"`inference\.(\w+)", PAGE))
    assert named == {item.name for item in fields(InferenceSection)} - {"kind", "python", "url"}
    assert ", ".join(map(str, HEAD_DIMS[:-1])) in PAGE
    assert set(re.findall(r"^\| `(\w+)` \| (?:min|w |0 )", PAGE, re.MULTILINE)) == set(CORRECTIONS)


async def test_the_fault_report_of_the_page_is_reproduced():
    params = sampling(temperature=0.6)
    policy = byte_policy()
    items = await sample_items(client_of(*policy, logprobs_mode="raw"), params)
    cfg = cpu_config(max_seq_len=128, micro_token_budget=4096, temperature=0.6)
    with pytest.raises(MismatchError) as caught:
        await Preflight(sampling=params, tokenizer=policy[1])(
            TorchBackend(policy[0], cfg, algo=make_grpo(group_size=4)), cfg, items
        )
    shown = re.search(r"^```\n(the trainer and.*?)^completion ids", PAGE, re.DOTALL | re.MULTILINE)[1]
    assert str(caught.value).startswith(shown)
