"""What runs before a program whose functions are called: its text, with a last line that calls
`main`, is the program that a sandbox gets. It imports nothing of ludic.

Calls come on stdin, as a JSON list of expressions. For each, one line of JSON goes to the stdout
that the process began with: `{"value": ...}` or `{"raised": "ValueError: ..."}`. What the program
prints goes nowhere.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
import types
from typing import Any

FILE = "program.py"
LONGEST_ERROR = 500
LONGEST_INT = 14_000
"""Bits. Python neither writes nor reads numbers over 4,300 digits, which is 14,284 bits."""
SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset)


def encode(value: Any) -> Any:
    """JSON for a value of Python's own types; `ValueVerifier` reads it. Classes that derive from
    them count as these.

    Example: `(1, {2.5})` is `{"tuple": [1, {"set": [2.5]}]}`; a long int is `{"int": "0x..."}`.
    """
    if value is None or value is True or value is False or type(value) in (float, str):
        return value
    if isinstance(value, str):
        return str.__getitem__(value, slice(None))
    if isinstance(value, int):
        number = int.__index__(value)
        return number if number.bit_length() <= LONGEST_INT else {"int": hex(number)}
    if isinstance(value, float):
        return float.__float__(value)
    for base in SEQUENCES:
        if isinstance(value, base):
            return {base.__name__: [encode(one) for one in base.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(one)] for key, one in dict.items(value)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return {"other": type(value).__name__}


def main(program: str, before: str = "", after: str = "") -> None:
    """Run the program between the two other texts, then the calls."""
    calls = json.loads(sys.stdin.read())
    channel, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    leave, write = os._exit, os.write

    def say(answer: Any) -> None:
        write_line(json.dumps(answer))

    def write_line(text: str) -> None:
        rest = text.encode() + b"\n"
        while rest:
            rest = rest[write(channel, rest) :]

    try:
        compiled = compile(program, FILE, "exec", dont_inherit=True)
    except SyntaxError as error:
        say({"syntax_error": [error.msg, error.lineno, error.offset]})
        leave(0)
    except BaseException as error:
        say({"syntax_error": [describe(error), None, None]})
        leave(0)
    module = types.ModuleType("program")
    sys.modules["program"] = module
    names = module.__dict__
    linecache.cache[FILE] = (len(program), None, program.splitlines(keepends=True), FILE)
    try:
        exec(before, names)
        exec(compiled, names)
        exec(after, names)
    except BaseException as error:
        for _ in calls:
            say({"raised": f"{describe(error)} (before the call)"})
        leave(0)
    for call in calls:
        try:
            answer = json.dumps({"value": encode(eval(call, names))})
        except BaseException as error:
            answer = json.dumps({"raised": describe(error)})
        write_line(answer)
    leave(0)


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
    except BaseException:
        return type(error).__name__
