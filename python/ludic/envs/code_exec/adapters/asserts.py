"""Takes asserts apart into tests: the call runs in the sandbox, and the expected value stays
outside.

`assert f(2) == 3` is the call `f(2)` and the value 3. An assert whose two sides cannot be told
apart, such as one that compares two calls, is refused: a program could replace the functions that
it uses, and would find the expected value in it.

The tests of a problem need names of the program: those that neither Python nor the texts around it
define. A test that needs nothing would pass with any program.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ludic.envs.code_exec.calls import Near, Same
from ludic.envs.code_exec.types import TestCase
from ludic.errors import DataError

_PYTHONS_OWN = frozenset(vars(builtins))


@dataclass(frozen=True)
class Names:
    """Of one statement, at the level of its module."""

    bound: frozenset[str]
    read: frozenset[str]


def need_the_program(tests: Sequence[TestCase], around: str, *, functions: Collection[str] = ()) -> list[TestCase]:
    """The tests, whose inputs are expressions. `around` are the texts that run before and after the
    program, `functions` what the program is to define, where that is known. DataError for a test
    that would pass without the program.

    A function that is named like one of Python's own must be the program's: `sum(1, 2)` becomes
    `globals()['sum'](1, 2)`, which no program without a `sum` can answer.
    """
    definitions = [_names_of(statement) for statement in ast.parse(around).body]
    return [_need(test, definitions, functions) for test in tests]


def own_function(name: str) -> str:
    """An expression for the program's function of this name: never Python's own."""
    return f"globals()[{name!r}]" if name in _PYTHONS_OWN else name


def _need(test: TestCase, definitions: Sequence[Names], functions: Collection[str]) -> TestCase:
    expression = ast.parse(test.input, mode="eval").body
    names = _closure(_names_of(ast.Expr(expression)).read, definitions)
    defined = frozenset().union(*(one.bound for one in definitions))
    named_like_pythons = (_called(expression) & _PYTHONS_OWN) - defined
    hidden = named_like_pythons & set(functions)
    if not hidden and not names - _PYTHONS_OWN and len(named_like_pythons) == 1:
        hidden = named_like_pythons
    if not hidden and not names - _PYTHONS_OWN:
        raise DataError(f"`{test.input:.120}` needs nothing of the program; remove the program's names from the code around it")
    return replace(test, input=_rename(expression, {name: own_function(name) for name in hidden})) if hidden else test


def _closure(read: frozenset[str], definitions: Sequence[Names]) -> frozenset[str]:
    """The undefined names among the names that are read, by them or by their definitions."""
    free: set[str] = set()
    seen: set[str] = set()
    rest = set(read)
    while rest:
        name = rest.pop()
        seen.add(name)
        of_name = [one for one in definitions if name in one.bound]
        if not of_name:
            free.add(name)
        for one in of_name:
            rest |= one.read - seen
    return frozenset(free)


def _names_of(statement: ast.stmt) -> Names:
    table = symtable.symtable(ast.unparse(statement), "around", "exec")
    symbols = table.get_symbols()
    bound = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()}
    for node in ast.walk(statement):
        # Tests import their function `from solution`, which is the program: such names are its own.
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in sys.stdlib_module_names:
            bound -= {alias.asname or alias.name for alias in node.names}
    read = {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
    inner = list(table.get_children())
    while inner:
        table = inner.pop()
        read |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
        inner += table.get_children()
    return Names(frozenset(bound), frozenset(read))


def _called(expression: ast.expr) -> frozenset[str]:
    """Example: `set(f([1]))` calls `set` and `f`."""
    calls = (node.func for node in ast.walk(expression) if isinstance(node, ast.Call))
    return frozenset(function.id for function in calls if isinstance(function, ast.Name))


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
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if is_text or isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass):
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
            tests.append(TestCase(_rename(call, rename or {}), expected, id=f"test_{len(tests)}"))
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
    """(the program for the sandbox, the expected output)."""
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
    if (found := _call_and_value(left, right)) is None:
        raise _refusal(statement, "compares with a value that is not written out")
    call, expected = found
    if isinstance(expected, bool):
        _truth(statement, call)
        return call, Same(expected) if isinstance(operator, ast.Is) else expected
    return found


def _call_and_value(left: ast.expr, right: ast.expr) -> tuple[ast.expr, Any] | None:
    """The side that calls, and the value of the other side; None if that is not written out."""
    for call, value in ((left, right), (right, left)):
        known, expected = _known_value(value)
        if known and any(isinstance(node, ast.Call) for node in ast.walk(call)):
            return call, expected
    return None


def _is_near(left: ast.expr, right: ast.expr) -> tuple[ast.expr, Near] | None:
    """`abs(f(x) - 1.5) < 0.01`."""
    if not (isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and left.func.id == "abs" and len(left.args) == 1):
        return None
    difference = left.args[0]
    known, tolerance = _known_value(right)
    if not (known and isinstance(difference, ast.BinOp) and isinstance(difference.op, ast.Sub)):
        return None
    found = _call_and_value(difference.left, difference.right)
    return found and (found[0], Near(found[1], abs_tol=float(tolerance)))


def _is_close(test: ast.Call) -> tuple[ast.expr, Near] | None:
    """`math.isclose(f(x), 1.5, rel_tol=0.01)`."""
    if ast.unparse(test.func) not in ("math.isclose", "isclose") or len(test.args) != 2:
        return None
    tolerances = {keyword.arg: _known_value(keyword.value) for keyword in test.keywords}
    if not set(tolerances) <= {"rel_tol", "abs_tol"} or not all(known for known, _ in tolerances.values()):
        return None
    limits = {"rel_tol": DEFAULT_REL_TOL, **{str(key): float(value) for key, (_, value) in tolerances.items()}}
    found = _call_and_value(*test.args)
    return found and (found[0], Near(found[1], **limits))


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
    return isinstance(function, ast.Name) and function.id in _PYTHONS_OWN


def _calls_program(expression: ast.AST) -> bool:
    return any(isinstance(node, ast.Call) and not _is_builtin(node.func) for node in ast.walk(expression))


def _known_value(expression: ast.expr) -> tuple[bool, Any]:
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
    inner = [_known_value(argument) for argument in expression.args]
    try:
        return all(known for known, _ in inner), make(*(value for _, value in inner))
    except (TypeError, ValueError):
        return False, None


def _parse(source: str) -> ast.Module:
    with must_be_python("the asserts are"):
        return ast.parse(source)


@contextmanager
def must_be_python(subject: str) -> Iterator[None]:
    """Raise DataError if the parser cannot read a text, whose name is the `subject`."""
    try:
        yield
    except DataError:
        raise
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise DataError(f"{subject} not Python: {error}") from error


def _refusal(statement: ast.stmt, reason: str) -> DataError:
    shown = " ".join(ast.unparse(statement).split())[:120]
    return DataError(f"`{shown}` {reason}; write tests as `assert f(x) == VALUE`, with the value written out")


def _rename(expression: ast.expr, names: Mapping[str, str]) -> str:
    """The expression with these names replaced by expressions."""

    class Renamed(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.parse(names[node.id], mode="eval").body if node.id in names else node

    return ast.unparse(Renamed().visit(expression))
