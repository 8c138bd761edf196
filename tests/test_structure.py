"""What keeps the code readable: short functions and files, declared members, tests in the same tree
as what they test."""

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "python" / "ludic"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
TEST_FOLDERS = {"core", "docs", "examples", "integration", "support"}
"""Folders of tests/ without a folder in the package: the Rust core, pages, scripts, real servers,
and what tests share."""


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_no_file_is_longer_than_a_reader_holds():
    sources = [*python_files(), *sorted((REPOSITORY / "crates").glob("*/src/**/*.rs"))]
    assert len(sources) > 300
    lengths = {str(path.relative_to(REPOSITORY)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_a_screen():
    lengths = {
        f"{path.relative_to(PACKAGE)}:{function.name}": function.end_lineno - function.lineno + 1
        for path in python_files()
        for function in functions_of(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert len(lengths) > 1000
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_every_folder_of_tests_is_one_of_the_package():
    folders = {path.parent.relative_to(REPOSITORY / "tests") for path in (REPOSITORY / "tests").rglob("test_*.py")}
    packages = {path.parent.relative_to(PACKAGE) for path in python_files()}
    assert {str(folder) for folder in folders - packages if folder.parts[0] not in TEST_FOLDERS} == set()
