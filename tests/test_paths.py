"""Documented import paths keep working when a module moves, and so do the paths that servers
receive as strings."""

import importlib
import json
from pathlib import Path

import pytest

from ludic.inference.vllm.in_server import flags

PUBLIC: dict[str, list[str]] = json.loads(Path(__file__).with_name("public_names.json").read_text(encoding="utf-8"))
"""Module -> the names that users import from it."""
MOVED = {
    "ludic.agent": "ludic.agents",
    "ludic.inference.vllm_server": "ludic.inference.vllm.in_server.server",
    "ludic.inference.vllm_utils": "ludic.inference.vllm.launch",
    "ludic.recipes.tokenizer": "ludic.models.byte_tokenizer",
    "ludic.training.batching.intra_batch_control": "ludic.training.rollouts.request_groups",
    "ludic.training.batching.requests_from_dataset": "ludic.training.rollouts.requests",
    "ludic.training.batching.rm_batching": "ludic.training.batching.preference",
    "ludic.training.batching.rollout_engine": "ludic.training.rollouts.engine",
}
"""Documented module -> the module that has its names."""
SERVER_STRINGS = {
    "ludic.inference.vllm.worker.WeightWorker": flags.WORKER_EXTENSION,
    "ludic.inference.vllm.think:GlobalThinkProcessor": flags.THINK_PROCESSOR,
    "ludic.inference.servers.client_tag_middleware.ClientTagMiddleware": flags.TAG_MIDDLEWARE,
    "ludic.inference.servers.secret_middleware.SecretMiddleware": flags.SECRET_MIDDLEWARE,
}
"""Strings in users' command lines -> the strings that `ludic serve` writes."""
PACKAGE = Path(__file__).parents[1] / "python"


@pytest.mark.parametrize("module", PUBLIC)
def test_every_documented_name_can_be_imported_from_its_documented_module(module):
    names = PUBLIC[module]
    assert names
    assert [name for name in names if not hasattr(importlib.import_module(module), name)] == []


@pytest.mark.parametrize(("exported", "home"), MOVED.items())
def test_an_alias_module_has_the_objects_of_the_module_it_stands_for(exported, home):
    alias, module = importlib.import_module(exported), importlib.import_module(home)
    assert alias.__all__
    assert [name for name in alias.__all__ if getattr(alias, name) is not getattr(module, name)] == []


@pytest.mark.parametrize("string", [*SERVER_STRINGS, *SERVER_STRINGS.values()])
def test_a_string_that_a_server_loads_names_an_existing_class_or_function(string):
    """The source is parsed and not imported: some of these modules need vLLM, which only the server
    has."""
    module, name = string.replace(":", ".").rsplit(".", 1)
    text = Path(PACKAGE, *module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    assert f"class {name}" in text or f"import {name}\n" in text


@pytest.mark.parametrize(("old", "new"), SERVER_STRINGS.items())
def test_an_old_server_string_names_the_same_class_as_the_new_one(old, new):
    module, name = new.replace(":", ".").rsplit(".", 1)
    alias = old.replace(":", ".").rsplit(".", 1)[0]
    text = Path(PACKAGE, *alias.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    assert f"from {module} import {name}\n" in text
