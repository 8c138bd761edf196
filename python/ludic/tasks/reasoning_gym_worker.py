"""The process that makes problems of reasoning-gym and scores answers: JSON lines in, JSON lines
out. It runs as a file and imports nothing from ludic.

Its argument is `{"datasets": [{"name": "chain_sum", "config": {"max_terms": 2}}], "seed": 0,
"size": 1000}`. It begins with `{"ready": true}`, and answers `{}` by `{"made": 1}`, or by the fault
of the argument. `{"dataset": 0, "index": 5}` is answered by a problem, `{"question": "...",
"answer": "42"}`, and the same with `"text": "41"` by `{"score": 0.0}`, or by `{"error": "..."}`.

Some verifiers call Python's `eval` on the answer, themselves or through sympy's parser: here it
takes literals, operators and calls of sympy's names, and nothing that could reach the machine. An
expression can also take unlimited time and memory (`9**9**9**9`). The parent kills this process at
its deadline; `limit_s` of a request and the memory limit end it if the parent is gone. The parent
sets PYTHONHASHSEED: five kinds of problems depend on the order of sets.
"""

import ast
import builtins
import json
import os
import random
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any


def main(memory_mb: int, settings: dict[str, Any]) -> None:
    limit = memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not look like a reply
    datasets: list[Any] = []
    state = _reply(lambda: _make(datasets, settings))
    builtins.eval = _evaluate
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request.get("limit_s", 0))
        reply = _reply(lambda: _answer(datasets, request)) if request else state  # noqa: B023  called right here
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


def _reply(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return make()
    except MemoryError:
        return {"error": "MemoryError: it took more memory than it may have"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _make(datasets: list[Any], settings: dict[str, Any]) -> dict[str, Any]:
    from reasoning_gym.factory import DATASETS, create_dataset

    for each in settings["datasets"]:
        if each["name"] not in DATASETS:
            return {"unknown": each["name"], "known": sorted(DATASETS)}
        datasets.append(create_dataset(each["name"], **each["config"], seed=settings["seed"], size=settings["size"]))
    return {"made": len(datasets)}


def _answer(datasets: list[Any], request: dict[str, Any]) -> dict[str, Any]:
    dataset = datasets[request["dataset"]]
    random.seed(f"{dataset.seed} {request['index']}")  # list_functions draws from it
    entry = dataset[request["index"]]
    if "text" not in request:
        return {"question": entry["question"], "answer": entry["answer"]}
    try:
        return {"score": float(dataset.score_answer(request["text"], entry))}
    except MemoryError:
        raise
    except Exception as error:  # some verifiers raise for a text that is no answer at all
        return {"score": 0.0, "raised": f"{type(error).__name__}: {error}"[:500]}


_EVAL = builtins.eval
_READ_ANSWERS = ("reasoning_gym.", "sympy.parsing.")
"""Modules whose `eval` may be given text of a model."""
_SYMBOLIC = ("sympy.core.", "sympy.functions.")
_HARMLESS = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load, ast.BinOp, ast.UnaryOp, ast.BoolOp),
    *(ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
_IS_WORD = re.compile(r"[\w.+-]*")
_OF_SYMPY = (ast.Call, ast.Name, ast.keyword)


def _evaluate(code: Any, globals: Any = None, locals: Any = None, /) -> Any:
    """`eval` for expressions of numbers, lists, and sympy's symbols and functions.

    Raises ValueError for attributes, subscripts, lambdas, comprehensions, Python's own functions,
    and, without sympy, for a string that is more than a word or a number (`Symbol('x')` has
    one)."""
    frame = sys._getframe(1)
    if not str(frame.f_globals.get("__name__")).startswith(_READ_ANSWERS):
        # Libraries define classes with it; without namespaces it would use this module's.
        return _EVAL(code, frame.f_globals if globals is None else globals, frame.f_locals if globals is None else locals)
    names = {**(globals or {}), **(locals or {})}
    tree = ast.parse(code.strip(), mode="eval")
    for node in ast.walk(tree):
        is_allowed = isinstance(node, _HARMLESS if globals is None else _HARMLESS + _OF_SYMPY)
        if isinstance(node, ast.Name):
            is_allowed = str(getattr(names.get(node.id), "__module__", "")).startswith(_SYMBOLIC)
        elif isinstance(node, ast.Call):
            is_allowed = globals is not None and isinstance(node.func, ast.Name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_allowed = globals is None or _IS_WORD.fullmatch(node.value) is not None
        if not is_allowed:
            raise ValueError(f"an answer with {ast.unparse(node) or type(node).__name__} is not evaluated")
    return _EVAL(compile(tree, "answer", "eval"), {} if globals is None else globals, locals)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
