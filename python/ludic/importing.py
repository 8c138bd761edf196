"""How modules of ludic are found and loaded: documented paths of modules that are elsewhere, and
packages that import a name when it is first read.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

MOVED = {
    "ludic.agent": "ludic.agents",
    "ludic.agents.react_agent": "ludic.agents.tool_agent",
    "ludic.context.base": "ludic.context.strategies",
    "ludic.context.full_dialog": "ludic.context.strategies",
    "ludic.context.truncated_thinking": "ludic.context.strategies",
    "ludic.distributed.adapters.local": "ludic.distributed.publisher",
    "ludic.envs.code_exec.adapters.apps": "ludic.envs.code_exec.adapters.base",
    "ludic.envs.code_exec.cache": "ludic.envs.code_exec.pool",
    "ludic.envs.code_exec.factory": "ludic.envs.code_exec.backend",
    "ludic.envs.code_exec.sandbox": "ludic.envs.code_exec.types",
    "ludic.envs.single_agent_env": "ludic.envs.env",
    "ludic.eval.core": "ludic.eval.evaluator",
    "ludic.inference.extensions.base": "ludic.inference.extensions.vllm",
    "ludic.inference.publishing": "ludic.inference.client",
    "ludic.inference.sampling": "ludic.inference.request",
    "ludic.inference.servers.client_tag_middleware": "ludic.inference.vllm.in_server.client_tag_middleware",
    "ludic.inference.servers.secret_middleware": "ludic.inference.vllm.in_server.secret_middleware",
    "ludic.inference.vllm.think": "ludic.inference.vllm.in_server.think_processor",
    "ludic.inference.vllm.worker": "ludic.inference.vllm.in_server.worker",
    "ludic.inference.vllm_client": "ludic.inference.vllm.reward_client",
    "ludic.inference.vllm_server": "ludic.inference.vllm.in_server.server",
    "ludic.inference.vllm_utils": "ludic.inference.vllm.launch",
    "ludic.interaction.base": "ludic.interaction.single_agent",
    "ludic.interaction.info": "ludic.interaction.single_agent",
    "ludic.interaction.step_collector": "ludic.interaction.multi_agent",
    "ludic.models.skeleton": "ludic.models.sharded_loading",
    "ludic.recipes.run_header": "ludic.runs.loggers",
    "ludic.recipes.tokenizer": "ludic.models.byte_tokenizer",
    "ludic.rollouts.agents": "ludic.agents",
    "ludic.rollouts.training.datasets.sft": "ludic.rollouts.training.datasets.dataset_loaders",
    "ludic.rollouts.training.filters": "ludic.training.rollouts.group_filters",
    "ludic.rollouts.training.weight_sync": "ludic.distributed.engines",
    "ludic.training.backend.futures": "ludic.event_loop",
    "ludic.training.batching.intra_batch_control": "ludic.training.rollouts.requests",
    "ludic.training.batching.micro_batching": "ludic.training.batching.packing",
    "ludic.training.batching.requests_from_dataset": "ludic.training.rollouts.requests",
    "ludic.training.batching.rm_batching": "ludic.training.batching.preference",
    "ludic.training.batching.rollout_engine": "ludic.training.rollouts.engine",
    "ludic.training.batching.synced_batching": "ludic.training.batching.source",
    "ludic.training.chat_template_utils": "ludic.training.samples.sft",
    "ludic.training.preference_utils": "ludic.training.samples.preference",
    "ludic.training.reward_credit": "ludic.training.credit_assignment",
}
"""Documented path -> the module that has its names. Importing either gives the same module, also
with `python -m`. A type checker does not run the finder and knows only the module on the right:
typed code imports from there, or from a package such as `ludic.training`.
"""


class MovedModules:
    """The finder and loader of the paths in `MOVED`, and of the modules below them."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        home = home_of(fullname)
        found = None if home == fullname else importlib.util.find_spec(home)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=found.origin, is_package=is_package)  # type: ignore[arg-type]  # it loads by exec_module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(home_of(spec.name))
        spec.loader_state = module.__spec__  # the import system overwrites it with the one of the documented path
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run already; give it its own spec back."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, fullname: str) -> CodeType | None:
        """What `python -m` runs."""
        found: Any = importlib.util.find_spec(home_of(fullname))
        return found.loader.get_code(found.name)


def home_of(name: str) -> str:
    """The module that the path stands for. Example: `ludic.agent.base_agent` is
    `ludic.agents.base_agent`."""
    path, below = name, ""
    while path not in MOVED:
        path, dot, last = path.rpartition(".")
        if not dot:
            return name
        below = f".{last}{below}"
    return home_of(MOVED[path] + below)


def install_finder() -> None:
    """Let the import system find the paths in `MOVED`."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `package`, from the imports in its `__init__.pyi`.

    Example: a stub with the line `from ludic.training.trainer import Trainer as Trainer` makes
    `package.Trainer` import `ludic.training.trainer` the first time it is read.
    """
    namespace = vars(sys.modules[package])
    stub = ast.parse(Path(namespace["__file__"]).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module for node in imports if node.module for alias in node.names}

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        namespace[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*namespace, *homes})

    return __getattr__, __dir__, sorted(homes)
