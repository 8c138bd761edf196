"""What the tests of a problem need of the program: names that neither Python nor the texts around
the program define. A test that needs nothing would pass with any program."""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

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
        raise DataError(
            f"`{test.input:.120}` needs nothing of the program, and would pass with any; leave what the program is to define "
            "out of the code that runs before and after it"
        )
    return replace(test, input=ast.unparse(_OwnFunctions(hidden).visit(expression))) if hidden else test


def _closure(read: frozenset[str], definitions: Sequence[Names]) -> frozenset[str]:
    """The names that nobody defines among those that are read, and that their definitions read."""
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
    bound -= {name for node in ast.walk(statement) for name in _from_elsewhere(node)}
    read = {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
    inner = list(table.get_children())
    while inner:
        table = inner.pop()
        read |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
        inner += table.get_children()
    return Names(frozenset(bound), frozenset(read))


def _from_elsewhere(node: ast.AST) -> set[str]:
    """The names that an import gives, unless its module is of Python's library: tests import their
    function `from solution`, which is the program."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in sys.stdlib_module_names:
        return {alias.asname or alias.name for alias in node.names}
    return set()


def _called(expression: ast.expr) -> frozenset[str]:
    """Example: `set(f([1]))` calls `set` and `f`."""
    calls = (node.func for node in ast.walk(expression) if isinstance(node, ast.Call))
    return frozenset(function.id for function in calls if isinstance(function, ast.Name))


class _OwnFunctions(ast.NodeTransformer):
    """Names of functions replaced by what only the program can define."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.parse(own_function(node.id), mode="eval").body if node.id in self._names else node
