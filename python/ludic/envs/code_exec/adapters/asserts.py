"""Takes asserts apart: the call runs in the sandbox, and what is expected stays outside.

`assert f(2) == 3` is the call `f(2)` and the value 3. An assert whose two sides cannot be told
apart, such as one that compares two calls, is refused: a program could replace what it uses, and
would find in it what is expected.
"""

from __future__ import annotations

import ast
import builtins
from typing import Any

from ludic.envs.code_exec.calls.values import Near, Same
from ludic.envs.code_exec.types import TestCase
from ludic.errors import DataError

_JUDGES = (ast.Compare, ast.BoolOp, ast.IfExp, ast.Lambda, ast.Not)
_DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
_COMBINE = (ast.BinOp, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Judge nothing, unless the program's values are among what they combine."""
_PREDICATES = frozenset(
    ("all", "allclose", "any", "array_equal", "callable", "eq", "hasattr", "is_", "isclose", "isinstance", "issubclass")
)
_JUDGED_INSIDE = "would be judged in the sandbox, by what a program could replace"
DEFAULT_REL_TOL = 1e-9
"""Of `math.isclose`."""


def read_asserts(source: str, *, rename: dict[str, str] | None = None) -> list[TestCase]:
    """A test for each assert of a source that has nothing but asserts, imports and texts. `rename`
    replaces names in calls. DataError for anything else, with its line and the reason.

    Example: `assert f(2) == 3, "no"` gives `TestCase("f(2)", 3, id="test_0")`.
    """
    tests: list[TestCase] = []
    for statement in _parse(source).body:
        if isinstance(statement, ast.Import | ast.ImportFrom) or _is_text(statement):
            continue
        if not isinstance(statement, ast.Assert):
            raise _refusal(statement, "is no assert")
        if isinstance(statement.test, ast.Constant) and statement.test.value is True:
            continue
        whole = statement.test
        for part in whole.values if isinstance(whole, ast.BoolOp) and isinstance(whole.op, ast.And) else [whole]:
            call, expected = _separate(statement, part)
            if any(map(_judges, ast.walk(call))):
                raise _refusal(statement, _JUDGED_INSIDE)
            tests.append(TestCase(ast.unparse(_Renamed(rename or {}).visit(call)), expected, id=f"test_{len(tests)}"))
    return tests


def read_imports(source: str) -> str:
    """The imports of a source of asserts, also those in its functions, for what runs before the
    program. One that fails is left out, as `from solution import f` is of the program itself.

    Example: `import math` gives that line, in a `try` of its own.
    """
    imports = [node for node in ast.walk(_parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    lines = [ast.unparse(node) for node in imports if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    return "".join(f"try:\n    {line}\nexcept ImportError:\n    pass\n" for line in dict.fromkeys(lines))


def read_check_function(source: str, *, name: str = "check", entry_point: str) -> list[TestCase]:
    """The tests of a function of asserts, such as HumanEval's `def check(candidate)`."""
    functions = [part for part in _parse(source).body if isinstance(part, ast.FunctionDef) and part.name == name]
    if len(functions) != 1 or len(functions[0].args.args) != 1:
        raise DataError(f"the test has no function {name}(candidate), which has the asserts")
    body = ast.unparse(ast.Module(body=list(functions[0].body), type_ignores=[]))
    return read_asserts(body, rename={functions[0].args.args[0].arg: entry_point})


def _separate(statement: ast.Assert, test: ast.expr) -> tuple[ast.expr, Any]:
    """(what runs in the sandbox, what is expected)."""
    if isinstance(test, ast.Call) and (close := _is_close(test)) is not None:
        return close
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _truth(statement, test.operand), False
    if not isinstance(test, ast.Compare):
        return _truth(statement, test), True
    if len(test.ops) != 1:
        raise _refusal(statement, "compares more than two values")
    left, right, operator = test.left, test.comparators[0], test.ops[0]
    if isinstance(operator, ast.Lt | ast.LtE) and (near := _is_near(left, right)) is not None:
        return near
    if not isinstance(operator, ast.Eq | ast.Is):
        raise _refusal(statement, f"compares with {type(operator).__name__}, which a program could replace")
    for call, value in ((left, right), (right, left)):
        known, expected = _literal(value)
        if known and _calls(call):
            if not isinstance(expected, bool):
                return call, expected
            _truth(statement, call)
            return call, Same(expected) if isinstance(operator, ast.Is) else expected
    raise _refusal(statement, "compares with a value that is not written out")


def _is_near(left: ast.expr, right: ast.expr) -> tuple[ast.expr, Near] | None:
    """`abs(f(x) - 1.5) < 0.01`."""
    if not (isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and left.func.id == "abs" and len(left.args) == 1):
        return None
    difference = left.args[0]
    known, tolerance = _literal(right)
    if not (known and isinstance(difference, ast.BinOp) and isinstance(difference.op, ast.Sub)):
        return None
    for call, value in ((difference.left, difference.right), (difference.right, difference.left)):
        has_value, expected = _literal(value)
        if has_value and _calls(call):
            return call, Near(expected, abs_tol=float(tolerance))
    return None


def _is_close(test: ast.Call) -> tuple[ast.expr, Near] | None:
    """`math.isclose(f(x), 1.5, rel_tol=0.01)`."""
    if ast.unparse(test.func) not in ("math.isclose", "isclose") or len(test.args) != 2:
        return None
    tolerances = {keyword.arg: _literal(keyword.value) for keyword in test.keywords}
    if not set(tolerances) <= {"rel_tol", "abs_tol"} or not all(known for known, _ in tolerances.values()):
        return None
    limits = {"rel_tol": DEFAULT_REL_TOL, **{str(key): float(value) for key, (_, value) in tolerances.items()}}
    for call, value in ((test.args[0], test.args[1]), (test.args[1], test.args[0])):
        known, expected = _literal(value)
        if known and _calls(call):
            return call, Near(expected, **limits)
    return None


def _truth(statement: ast.Assert, expression: ast.expr) -> ast.expr:
    """`f(x)` itself; not `isinstance(f(x), int)`, which a program could replace, nor `all(...)`."""
    if not isinstance(expression, ast.Call) or _is_builtin(expression.func):
        raise _refusal(statement, _JUDGED_INSIDE)
    return ast.Call(ast.Name("bool", ast.Load()), [expression], [])


def _judges(node: ast.AST) -> bool:
    """Whether this part of a call compares or tests what the program returns, so that an object's
    own `__eq__`, `__sub__` or the like would decide.

    Example: `any(...)`, `f(1) - 3`, `[3].count(f(1))`, `f(1).__eq__(3)`; not `f(10 - 3)`.
    """
    if isinstance(node, _JUDGES):
        return True
    if isinstance(node, _COMBINE):
        return _calls_program(node)
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, _DISPLAYS) and _calls_program(node)
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        of_display = isinstance(node.func.value, _DISPLAYS) and _calls_program(node)
        return of_display or node.func.attr in _PREDICATES or node.func.attr.startswith("__")
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    return name in _PREDICATES or (name in ("max", "min") and len(node.args) > 1 and _calls_program(node))


def _is_builtin(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id in vars(builtins)


def _calls_program(expression: ast.AST) -> bool:
    return any(isinstance(node, ast.Call) and not _is_builtin(node.func) for node in ast.walk(expression))


def _literal(expression: ast.expr) -> tuple[bool, Any]:
    """(whether it is written out, its value). `set([1])` and its like of literals count, as does
    `float("inf")`."""
    try:
        return True, ast.literal_eval(expression)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    if not (isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name) and not expression.keywords):
        return False, None
    make = {"set": set, "frozenset": frozenset, "tuple": tuple, "list": list, "float": float}.get(expression.func.id)
    if make is None or len(expression.args) > 1:
        return False, None
    inner = [_literal(argument) for argument in expression.args]
    try:
        return all(known for known, _ in inner), make(*(value for _, value in inner))
    except (TypeError, ValueError):
        return False, None


def _calls(expression: ast.expr) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(expression))


def _parse(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise DataError(f"the asserts are not Python: {error}") from error


def _is_text(statement: ast.stmt) -> bool:
    return (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)) or isinstance(statement, ast.Pass)


def _refusal(statement: ast.stmt, reason: str) -> DataError:
    shown = " ".join(ast.unparse(statement).split())[:120]
    return DataError(f"`{shown}` {reason}; write tests as `assert f(x) == VALUE`, with the value written out")


class _Renamed(ast.NodeTransformer):
    """Names replaced by others."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._names.get(node.id, node.id), node.ctx)
