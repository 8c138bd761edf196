"""The layers of the library: lower layers never import higher ones, and no two modules import each
other.

Every import counts: at module level, inside functions and for type checking.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "python"
LAYERS = [
    ["ludic.distribution", "ludic.errors", "ludic.event_loop", "ludic.importing", "ludic.user_objects", "ludic._core"],
    ["ludic.columns", "ludic.types", "ludic.files"],
    ["ludic.images"],
    ["ludic.launch"],
    ["ludic.models", "ludic.parsers", "ludic.data", "ludic.context"],
    ["ludic.inference"],
    ["ludic.envs", "ludic.agents", "ludic.distributed"],
    ["ludic.interaction"],
    [
        "ludic.training.types",
        "ludic.training.config",
        "ludic.training.ranks",
        "ludic.training.rng",
        "ludic.training.freed_memory",
        "ludic.training.watchdog",
        "ludic.training.credit_assignment",
        "ludic.training.group_credit",
        "ludic.training.process_rewards",
        "ludic.training.coefficients",
        "ludic.training.filters",
        "ludic.training.loss",
        "ludic.training.maxent",
    ],
    [
        *("ludic.training.algorithm", "ludic.training.presets", "ludic.training.distillation"),
        "ludic.training.info_seed.seed_tags",
        "ludic.training.info_seed.weight_entropies",
    ],
    [
        "ludic.training.rollouts",
        "ludic.training.samples",
        "ludic.training.batching",
        "ludic.training.info_seed",
        "ludic.training.queue",
        "ludic.training.judge",
        "ludic.training.reward_functions",
        "ludic.training.reward_scorer",
        "ludic.training.rubric",
    ],
    [
        "ludic.training.backend",
        "ludic.training.callbacks",
        "ludic.training.controllers",
        "ludic.training.critic",
        "ludic.training.evaluators",
        "ludic.training.preflight",
        "ludic.training.loop",
        "ludic.training.preparation",
        "ludic.training.reference",
        "ludic.training.scoring",
        "ludic.training.checkpoint",
        "ludic.training.classification_metrics",
        "ludic.training.hardware",
        "ludic.training.loggers",
        "ludic.training.reducers",
        "ludic.training.rm_config",
        "ludic.training.stats",
    ],
    ["ludic.training.trainer", "ludic.training.rm_trainer", "ludic.training.dpo_trainer"],
    ["ludic.eval", "ludic.tasks"],
    ["ludic.rollouts"],
    ["ludic.recipes"],
    ["ludic.runs"],  # it runs recipes, for the objects of `trainers` and for the commands
    ["ludic.trainers"],
    ["ludic.rollouts.training.pipeline"],  # it writes recipes, which commands run in processes of their own
    ["ludic.cli"],
]
UPWARD = {
    "ludic.inference.vllm.client imports ludic.distributed.adapters.vllm",  # the documented sync_weights of chat clients
}
"""Imports of a higher layer, each with its reason. Remove an entry when its import is gone."""
ALIASES = {("ludic.training.algorithm", "ludic.training.presets"), ("ludic", "ludic.trainers")}
"""Documented names whose module is imported when the first of them is used."""
CIRCLES: list[set[str]] = []
"""Modules that import each other. Remove an entry when its cycle is gone."""
FACADES = {"ludic", "ludic.training"}
"""Packages that import nothing themselves but export names of all layers. They belong to no
layer."""


def layer_of(module: str) -> int | None:
    """The layer with the longest name that is a prefix of the module's."""
    layers = [(len(name), number) for number, names in enumerate(LAYERS) for name in names if f"{module}.".startswith(f"{name}.")]
    return max(layers)[1] if layers else None


def module_name(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_of(root: Path = ROOT) -> dict[str, Path]:
    return {module_name(path, root): path for path in sorted((root / "ludic").rglob("*.py"))}


def imports_of(tree: ast.Module, modules: Iterable[str]) -> set[str]:
    """What the file imports from ludic: the module itself, or the module that has the imported
    name."""
    imports = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            home = "." * node.level + (node.module or "")  # relative imports are refused below
            names = {f"{home}.{alias.name}" for alias in node.names}
            imports |= {name if name in modules else home for name in names}
    return {name for name in imports if name.split(".")[0] in ("ludic", "")}


def import_graph(root: Path = ROOT) -> dict[str, set[str]]:
    modules = modules_of(root)
    return {
        module: imports_of(ast.parse(path.read_text(encoding="utf-8")), modules) - {module} for module, path in modules.items()
    }


def upward_imports(root: Path = ROOT) -> list[str]:
    problems = []
    for module, targets in import_graph(root).items():
        here = layer_of(module)
        for target in sorted(targets):
            there = layer_of(target)
            if target.startswith("."):
                problems.append(f"{module} imports {target}: say it from the root")
            elif here is not None and there is not None and there > here:
                problems.append(f"{module} imports {target}")
    return problems


def cycles_of(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that reach each other through imports."""

    def reach(start: str) -> set[str]:
        visited, todo = set(), [start]
        while todo:
            for target in graph.get(todo.pop(), ()):
                if target not in visited and target in graph:
                    visited.add(target)
                    todo.append(target)
        return visited

    reached = {module: reach(module) for module in graph}
    circles: list[set[str]] = []
    for module in graph:
        circle = {other for other in reached[module] if module in reached[other]} - {module}
        if circle and {module, *circle} not in circles:
            circles.append({module, *circle})
    return circles


def test_no_module_imports_one_of_a_higher_layer():
    assert set(upward_imports()) == UPWARD


def test_no_two_modules_import_each_other():
    graph = {
        module: {target for target in targets if (module, target) not in ALIASES} for module, targets in import_graph().items()
    }
    assert sorted(map(sorted, cycles_of(graph))) == sorted(map(sorted, CIRCLES))


def test_every_module_has_a_layer():
    modules = set(modules_of())
    assert len(modules) > 50
    assert {module for module in modules if layer_of(module) is None} == FACADES
    assert {name for names in LAYERS for name in names} - modules == {"ludic._core"}


def test_a_module_can_be_imported_from_a_facade_without_loading_the_others():
    stubs = sorted(module_name(path) for path in (ROOT / "ludic").rglob("__init__.pyi"))
    assert "ludic.training" in stubs
    for package in stubs:
        assert "torch" not in run(f"import sys, {package}; print(*sys.modules)").split(), package


def test_the_check_reports_upward_imports_and_cycles(tmp_path):
    package = tmp_path / "ludic"
    package.mkdir()
    (package / "errors.py").write_text("from ludic.parsers import xml_parser\nimport ludic\n")
    (package / "parsers.py").write_text("from ludic.errors import LudicError\nfrom .errors import LudicError\n")
    (package / "event_loop.py").write_text("def late():\n    from ludic import cli\n")
    (package / "cli.py").write_text("if TYPE_CHECKING:\n    from ludic.event_loop import late\nimport ludic.errors\n")
    assert upward_imports(tmp_path) == [
        "ludic.errors imports ludic.parsers",
        "ludic.event_loop imports ludic.cli",
        "ludic.parsers imports .errors: say it from the root",
    ]
    assert cycles_of(import_graph(tmp_path)) == [
        {"ludic.cli", "ludic.event_loop"},
        {"ludic.errors", "ludic.parsers"},
    ]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=600)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("ludic", ["torch", "transformers", "numpy"]),
        ("ludic._core", ["torch", "transformers"]),
        ("ludic.types", ["torch", "transformers"]),
        ("ludic.inference", ["torch", "transformers", "vllm"]),
        ("ludic.agents", ["torch", "transformers"]),
        ("ludic.interaction", ["torch", "transformers"]),
        ("ludic.tasks.errand", ["torch", "transformers"]),  # each of its episodes may be a fork of what it imports
        ("ludic.distributed", ["torch", "transformers", "vllm"]),
        ("ludic.cli.app", ["torch", "transformers"]),
        ("ludic.cli.checkpoint", ["torch", "transformers"]),
        ("ludic.cli.status", ["torch", "transformers"]),
        ("ludic.cli.train", ["torch", "transformers"]),
        ("ludic.runs.command", ["torch", "transformers"]),
        ("ludic.training", ["transformers", "peft", "wandb"]),
        ("ludic.training.queue.base", ["torch", "transformers", "redis"]),
        ("ludic.rollouts.training.types", ["torch", "transformers"]),
        ("ludic.rollouts.training.filters", ["torch", "transformers"]),
        ("ludic.rollouts.training.datasets.data_buffer", ["torch", "transformers"]),
        ("ludic.rollouts.training.metrics", ["torch", "transformers", "wandb"]),
        ("ludic.rollouts.training.rollout_gen.async_rollout_manager", ["torch", "transformers"]),
        ("ludic.training.trainer", ["transformers", "peft", "wandb"]),
    ],
)
def test_importing_a_package_does_not_load(module, absent):
    loaded = run(f"import sys, {module}; print(*[name for name in {absent!r} if name in sys.modules])")
    assert loaded == ""


def test_importing_ludic_computes_for_less_than_a_tenth_of_a_second():
    """The least CPU time of three, since the load of the machine changes it."""
    code = "import time; t = time.process_time(); import ludic; print(time.process_time() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.1
