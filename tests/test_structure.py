"""Rules that keep the code readable: short functions and files, declared members, tests in the same
tree as the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "python" / "ludic"
LONG_FILE_LINES = 400
MAX_LONG_FILES = 0.05
"""Share of the package's files that may be longer than `LONG_FILE_LINES`."""
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 80
TEST_FOLDERS = {"core", "docs", "examples", "gpu", "integration", "support"}
"""Folders of tests/ without a counterpart in the package: the Rust core, pages, scripts, real
servers, GPUs and shared support."""
FOREIGN_OBJECTS = {
    "agents": "a user's function",
    "cli": "the standard library of this platform",
    "distributed": "a user's chat client and engine",
    "envs": "foreign environments and their values, a user's runner, the standard library of this platform",
    "eval": "a user's argparse.Namespace",
    "files": "numpy and torch",
    "inference": "transformers, PEFT, torch, openai, vLLM and a tokenizer",
    "interaction": "a user's agent and environment",
    "models": "transformers, PEFT, bitsandbytes and wrappers of torch",
    "recipes": "a user's function",
    "rollouts": "a user's backend, environment, buffer, logger and engine, numpy and torch",
    "runs": "a tokenizer, a model and a config of transformers",
    "tasks": "a user's reward function",
    "trainers": "a user's function",
    "training": "a user's reward, loss, filter and environment, transformers, torch, wandb and the C library",
    "user_objects.py": "a user's module, and a user's object, adapted",
}
"""Packages that may read optional members, and the foreign objects that they read them from. Our
own types declare every member."""


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_no_file_exceeds_the_line_limit():
    folders = ["crates/*/src", "benches", "tests/support"]
    others = [path for folder in folders for kind in ("rs", "py") for path in sorted(REPOSITORY.glob(f"{folder}/**/*.{kind}"))]
    assert {REPOSITORY / "benches" / "src" / "lib.rs", Path(__file__).with_name("support") / "stub_vllm.py"} < set(others)
    sources = [*python_files(), *others]
    assert len(sources) > 400
    lengths = {str(path.relative_to(REPOSITORY)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_few_files_are_long():
    files = python_files()
    long = [path for path in files if len(path.read_text(encoding="utf-8").splitlines()) > LONG_FILE_LINES]
    assert len(long) <= MAX_LONG_FILES * len(files)


def test_no_function_exceeds_the_line_limit():
    lengths = {
        f"{path.relative_to(PACKAGE)}:{function.name}": function.end_lineno - function.lineno + 1
        for path in python_files()
        for function in functions_of(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert len(lengths) > 1000
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_every_test_folder_mirrors_a_folder_of_the_package():
    folders = {path.parent.relative_to(REPOSITORY / "tests") for path in (REPOSITORY / "tests").rglob("test_*.py")}
    packages = {path.parent.relative_to(PACKAGE) for path in python_files()}
    assert {str(folder) for folder in folders - packages if folder.parts[0] not in TEST_FOLDERS} == set()


def optional_reads(tree: ast.Module) -> int:
    """`getattr` with a default, and `hasattr`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return sum(call.func.id == "hasattr" or (call.func.id == "getattr" and len(call.args) == 3) for call in calls)


def test_optional_members_are_read_only_from_foreign_objects():
    reading = {
        path.relative_to(PACKAGE).parts[0]
        for path in python_files()
        if optional_reads(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert reading == set(FOREIGN_OBJECTS)


def test_the_check_detects_optional_reads():
    assert optional_reads(ast.parse("getattr(a, 'b', None) or hasattr(c, 'd') or getattr(e, 'f')")) == 2
