"""The grain of the package: files, lines of code, refusals, and the files that a step passes.

    python -m benches.python.shape                     # this checkout
    python -m benches.python.shape OTHER/python/ludic  # beside another one

Definitions:

- A line of code bears a token that is neither a comment nor part of a docstring (any statement that
  is a string alone).
- A refusal is a line of a `raise`, of an `if`, `elif` or `except` whose body ends in one and has at
  most three statements, or of a function named check, validate, verify, require, ensure, refuse or
  reject.
- An import is a line of an `import` statement.
- A run passes a file or a function if Python calls a function that stands there, in any thread.
  What is counted is `ludic train steps=4`: "recipe to weights" from the command to the end of the
  first step, after which the sampler has the new weights; "one step" is the third.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import tokenize
from pathlib import Path
from statistics import median, quantiles
from types import CodeType, FrameType
from typing import Any

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "python" / "ludic"
SMALL_FILE_LINES = 60
CHECK = re.compile("_*(check|validate|verify|require|ensure|refuse|reject)")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python.shape", description=__doc__.splitlines()[0])
    parser.add_argument(
        "packages",
        nargs="*",
        type=lambda name: Path(name).resolve(),
        default=[PACKAGE],
        help="folders of the package; default: this checkout's",
    )
    parser.add_argument("--source-only", action="store_true", help="train nothing")
    options = parser.parse_args()
    run = (lambda package: {}) if options.source_only else measure_run
    columns = [measure_source(package) | run(package) for package in options.packages]
    for name in columns[0]:
        print(f"| {name} | {' | '.join(f'{column[name]:,}' for column in columns)} |")


def measure_source(package: Path) -> dict[str, float]:
    """Counts over the Python files of `package`."""
    files = sorted(package.rglob("*.py"))
    sources = [path.read_text(encoding="utf-8") for path in files]
    trees = [ast.parse(source) for source in sources]
    code = [code_lines(source, tree) for source, tree in zip(sources, trees, strict=True)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    lengths = [function.end_lineno - function.lineno + 1 for function in functions if function.end_lineno is not None]
    total = sum(map(len, code))

    def per_thousand(count: int) -> float:
        return round(1000 * count / total, 1)

    def share(lines: list[set[int]]) -> float:
        return round(100 * sum(len(some & of_code) for some, of_code in zip(lines, code, strict=True)) / total, 1)

    return {
        "files": len(files),
        "lines": sum(len(source.splitlines()) for source in sources),
        "code lines": total,
        "files / 1k code": per_thousand(len(files)),
        "files under 60 code lines": sum(len(lines) < SMALL_FILE_LINES for lines in code),
        "functions / 1k": per_thousand(len(functions)),
        "classes / 1k": per_thousand(len(classes)),
        "raise / 1k": per_thousand(sum(isinstance(node, ast.Raise) for node in nodes)),
        "refusal lines %": share([refusal_lines(tree) for tree in trees]),
        "import lines %": share([import_lines(tree) for tree in trees]),
        "Protocols": sum(any(_name(base) == "Protocol" for base in node.bases) for node in classes),
        "function lines, median": median(lengths),
        "function lines, p90": quantiles(lengths, n=10)[-1],
        "function lines, max": max(lengths),
    }


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines of code of a file."""
    docstrings = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    prose: set[int] = set()
    for node in docstrings:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(_lines_of(node))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - prose


def import_lines(tree: ast.Module) -> set[int]:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {line for node in imports for line in _lines_of(node)}


def refusal_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and CHECK.match(node.name)):
            lines.update(_lines_of(node))
        elif isinstance(node, ast.If | ast.ExceptHandler) and isinstance(node.body[-1], ast.Raise) and len(node.body) <= 3:
            lines.update(range(node.lineno, (node.body[-1].end_lineno or node.lineno) + 1))
    return lines


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _name(base: ast.expr) -> str:
    base = base.value if isinstance(base, ast.Subscript) else base
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def measure_run(package: Path) -> dict[str, float]:
    """Files and functions that a small GRPO run of the package passes, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "counts.json"
        # Another checkout comes first on the path, with this file as it stands here.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package.parent), str(REPOSITORY)])}
        command = [sys.executable, __file__, "--traced", str(package), str(output), folder]
        subprocess.run(command, check=True, env=environment, cwd=folder, stdout=subprocess.DEVNULL)
        counts: dict[str, float] = json.loads(output.read_text())
    return counts


class Passed:
    """The functions called since the last mark."""

    def __init__(self, package: Path) -> None:
        self.prefix = str(package.resolve()) + os.sep
        self.codes: set[CodeType] = set()

    def start(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def take(self) -> set[CodeType]:
        codes, self.codes = self.codes, set()
        return codes

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self.prefix) and frame.f_code.co_name != "<module>":
            self.codes.add(frame.f_code)


def run_traced(package: Path, output: Path, folder: str) -> None:
    """Train with every call noted, and write the counts to `output`."""
    from ludic import GRPO  # noqa: F401  imports count for no run
    from ludic.cli.app import app
    from ludic.training.callbacks import Callback

    passed, steps = Passed(package), []

    class Marks(Callback):
        def on_step(self, event: Any) -> None:
            steps.append(passed.take())

    sys.modules["shape_marks"] = type(sys)("shape_marks")
    sys.modules["shape_marks"].Marks = Marks  # type: ignore[attr-defined]
    settings = ["steps=4", "warmup.steps=2", "evaluation.prompts=4", f"output={folder}/runs", "callbacks.own=[shape_marks:Marks]"]
    passed.start()
    app(["train", *settings], standalone_mode=False)
    first, step = steps[0], steps[2]
    counts = {
        "files, recipe to weights": len({code.co_filename for code in first}),
        "functions, recipe to weights": len(first),
        "files, one step": len({code.co_filename for code in step}),
        "functions, one step": len(step),
    }
    output.write_text(json.dumps(counts))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--traced"]:
        run_traced(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        main()
