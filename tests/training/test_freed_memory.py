"""Freed memory goes back to the system, and not too often."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from ludic.training import freed_memory
from ludic.training.freed_memory import FreedMemory, find_allocator_function

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")

HOLES = """
import psutil
import torch
from ludic.training.freed_memory import FreedMemory, settle_memory
resident = lambda: psutil.Process().memory_info().rss
with settle_memory():
    before = resident()
    tensors = [torch.ones(1 << 18) for _ in range(256)]  # 1 MiB each
    kept = tensors[::2]                                  # so that no two holes adjoin
    del tensors
    held = resident()
    FreedMemory().return_to_system()
    print(held - before, resident() - before)
"""


def resident_with_holes(**variables):
    """Bytes by which a process grows that frees every second of 256 tensors of a MiB: before and
    after it returns what it has freed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run([sys.executable, "-c", HOLES], env={**clean, **variables}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return tuple(map(int, done.stdout.split()))


@on_linux
def test_holes_between_tensors_that_stay_are_returned():
    held, returned = resident_with_holes()
    assert held > 240 << 20  # the allocator keeps the holes
    assert returned < 160 << 20  # 128 MiB are in use


OTHERS = """
import asyncio, gc, threading
from ludic.training.freed_memory import YOUNG_OBJECTS, settle_memory
gc.set_threshold(500, 7, 5)
inside = lambda: (gc.get_threshold(), gc.get_freeze_count() > 0)
before = inside()
seen = []
async def work(last):
    with settle_memory():
        await asyncio.sleep(last)
        seen.append(inside())
async def both():
    await asyncio.gather(work(.05), work(.1))  # the first one ends inside the second
threads = [threading.Thread(target=lambda: asyncio.run(both())) for _ in range(3)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert seen == [((YOUNG_OBJECTS, 7, 5), True)] * 6, seen
assert inside() == before == ((500, 7, 5), False)
"""


def test_runs_at_the_same_time_restore_the_program_s_settings_when_the_last_one_ends():
    subprocess.run([sys.executable, "-c", OTHERS], check=True, timeout=600)


@on_linux
def test_variables_of_the_allocator_take_precedence():
    held, returned = resident_with_holes(MALLOC_MMAP_THRESHOLD_=str(32 << 20))
    assert held > 240 << 20
    assert returned > 240 << 20


@given(st.lists(st.floats(0, 20), max_size=30), st.floats(0, 10))
def test_it_is_done_once_in_a_while(waits, every_s):
    calls, now = [], [0.0]

    def trim(padding):
        calls.append(now[0])
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(freed_memory, "find_allocator_function", lambda name: trim)
        freed = FreedMemory(every_s=every_s, clock=lambda: now[0])
    expected, last = [], None
    for wait in waits:
        now[0] += wait
        is_due = last is None or now[0] - last >= every_s
        if is_due:
            expected.append(now[0])
            last = now[0]
        assert freed.return_to_system() == is_due
    assert calls == expected


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert find_allocator_function("malloc_trim") is None
    assert not FreedMemory().return_to_system()
