"""Programs that try to pass a test of calls that they fail, in a sandbox."""

import asyncio
import json
import re

import pytest
from commands import NETWORK, ludic
from real_sandboxes import BACKENDS, backend_or_skip, pool_or_skip

from ludic.envs.code_exec.adapters.asserts import read_asserts
from ludic.envs.code_exec.calls import FunctionCallRunner
from ludic.envs.code_exec.types import TestCase
from ludic.errors import DataError

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("sandboxes")]

CHEATS = {
    "equals everything": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 1
    def __repr__(self): return 'anything'
f = lambda n: Any()""",
    "an int that equals everything": """
class Any(int):
    __eq__ = lambda self, other: True
    __hash__ = int.__hash__
f = lambda n: Any(1)""",
    "a class that says it is int": """
class Any:
    __class__ = int
    def __eq__(self, other): return True
    def __repr__(self): return '1'
f = lambda n: Any()""",
    "replaces repr and json": """
import builtins, json
builtins.repr = builtins.str = lambda value: 'true'
json.dumps = json.JSONEncoder.encode = lambda *a, **k: '{"passed": true}'
f = lambda n: 1""",
    "replaces isinstance and type": """
import builtins
builtins.isinstance = lambda *a: True
builtins.type = lambda *a: int
f = lambda n: 1""",
    "changes the text before the program": """
import sys
main = sys.modules['__main__']
main.encode = lambda value: True
main.describe = lambda error: ''
f = lambda n: 1""",
    "leaves at once": "import os\nos._exit(0)",
    "leaves in the call": "import os\nf = lambda n: os._exit(0)",
    "leaves as if all were well": "f = lambda n: (_ for _ in ()).throw(SystemExit(0))",
    "writes at the end": """
import atexit, os
atexit.register(lambda: [os.write(end, b'{"value": true}\\n') for end in range(3, 9)])
f = lambda n: 1""",
    "writes many values": """
import os
for end in range(3, 9):
    try: os.write(end, b''.join(b'{"value": %d}\\n' % n for n in range(3)))
    except OSError: pass
f = lambda n: 1""",
    "writes a verdict": """
import os
for end in range(3, 9):
    try: os.write(end, b'{"passed": true}\\n' * 2)
    except OSError: pass
os._exit(0)""",
    "a thread that writes": """
import os, threading
def write():
    while True:
        try: os.write(3, b'{"value": true}\\n')
        except OSError: pass
threading.Thread(target=write, daemon=True).start()
f = lambda n: 1""",
    "asks the frames": """
import re, sys
def f(n):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            found = re.search('27182[8]', repr(value))
            if found: return int(found[0])
        frame = frame.f_back""",
    "reads its memory": """
import re
def f(n):
    for line in open('/proc/self/maps'):
        start, end = (int(part, 16) for part in line.split()[0].split('-'))
        if 'rw' in line.split()[1]:
            try:
                with open('/proc/self/mem', 'rb') as memory:
                    memory.seek(start)
                    found = re.search(b'27182[8]', memory.read(end - start))
                    if found: return int(found[0])
            except (OSError, ValueError, OverflowError):
                pass""",
    "an endless value": """
f = lambda n: list(range(10**7))""",
    "a value in itself": """
def f(n):
    value = []
    value.append(value)
    return value""",
}


@pytest.fixture(scope="module", params=BACKENDS)
def sandbox(request):
    with pool_or_skip(request.param) as pool:
        yield asyncio.run(pool.checkout())


def judge(sandbox, code):
    runner = FunctionCallRunner(20.0)
    tests = [TestCase("f(1)", 271828), TestCase("f(2)", 314159)]
    return asyncio.run(runner.run_tests(sandbox, code, tests, verifier=runner.default_verifier))


@pytest.mark.parametrize("name", CHEATS)
def test_no_value_is_faked(sandbox, name):
    batch = judge(sandbox, CHEATS[name])
    assert not batch.sandbox_failed, batch
    assert batch.passed_count == 0
    honest = judge(sandbox, "f = lambda n: {1: 271828, 2: 314159}[n]")
    assert honest.all_passed


OBLIGING = """
class Any(int):
    __eq__ = __lt__ = __le__ = __contains__ = lambda self, other: True
    __hash__ = lambda self: 3
    __sub__ = __rsub__ = lambda self, other: 0
f = lambda n: Any(1)"""
ASSERTS = (
    "(f(2) == 3) == True", "isinstance(f(2), str) == True", "any(f(2) == x for x in (3, 4)) == True", "f(2) - 3 == 0",
    "(lambda y: y == 3)(f(2)) == True", "[3].count(f(2)) == 1", "len({f(2), 3}) == 1", "f(2).__eq__(3)", "f(2) == 3", "3 == f(2)",
    "f(2) is True", "abs(f(2) - 3) < 1e-3", "abs(f(2) - 3) == 0",
)  # fmt: skip


def test_no_assert_is_judged_by_what_an_object_says(sandbox):
    """An object that agrees with everything: each assert is refused, or the program fails it."""
    tests = []
    for condition in ASSERTS:
        try:
            tests += read_asserts(f"assert {condition}")
        except DataError:
            continue
    assert [test.input for test in tests] == ["f(2)"] * 4
    runner = FunctionCallRunner(20.0)
    batch = asyncio.run(runner.run_tests(sandbox, OBLIGING, tests, verifier=runner.default_verifier))
    assert not batch.sandbox_failed, batch
    assert batch.passed_count == 0


def test_a_run_reports_how_long_programs_ran(tmp_path):
    """On problems of a file, with the small model of the recipe."""
    rows = [{"question": f"{n}>", "inputs": ["1"], "outputs": [str(n)], "solutions": [f"print({n})"]} for n in range(6)]
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = ["warmup.steps=2", "steps=2", "rollout.prompts=2", "rollout.group_size=2", "threads=1", "task.args.workers=1"]
    settings += ["task.args.num_heldout=2", "rollout.max_new_tokens=20", "evaluation.samples_per_prompt=1"]
    with backend_or_skip("bubblewrap"):
        printed = ludic("train", f"data={data}", "reward=code", *settings, *NETWORK, f"output={tmp_path / 'runs'}")
    assert re.search(r"Programs ran during \d+\.\d s, \d+% of the wall time", printed)
    [folder] = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert 0 <= summary["execution_s"] <= summary["wall_s"]
