"""Feeds a program that runs, collects what it prints, and stops it at its limits; and what a
process tells the kernel about itself (`prctl(2)`)."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
import time
from typing import Any

from ludic.envs.code_exec.in_sandbox.leftovers import ALONE, Usage

JSON = dict[str, Any]
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_THP_DISABLE = 22, 38, 41
SECCOMP_MODE_FILTER = 2
INSTRUCTION_BYTES = 8


_PRCTL: Any = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
"""The function of the C library, once for all processes that are forked; None if it has none."""
if _PRCTL is not None:
    _PRCTL.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def control(option: int, value: int) -> None:
    """prctl; where there is none, nothing."""
    if _PRCTL is not None:
        _PRCTL(option, value, 0, 0, 0)


def install_filter(program: bytes) -> None:
    """Have the kernel check every system call of this process and its children with a filter
    (`seccomp(2)`). OSError if it does not take it."""
    instructions = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) // INSTRUCTION_BYTES, ctypes.addressof(instructions)))
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0)):
        if _PRCTL is None or _PRCTL(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"prctl{arguments[:2]} failed: {os.strerror(ctypes.get_errno())}")


HOST_IS_GONE = 3
"""The exit status of a handler for which no process waits."""
MEGABYTE = 1 << 20
KEPT_OUTPUT = 1 << 20
"""Bytes of stdout and of stderr. A program that prints more is stopped."""
MOST_PROCESSES = 32
MOST_FILES = 4096
PATIENCE = 10
"""Times `timeout_s` that a program has if it waits for a processor. After that nothing is known of
it: the machine is too busy."""
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.005, 0.04
"""How often memory, time, processes and files are looked at: often at first and while there are
several processes, each with the whole limit as its address space, else less."""


def longest_s(request: JSON) -> float:
    """How long a request may take."""
    return PATIENCE * float(request.get("timeout_s", 0.0))


class Watch:
    """Feeds a program, collects what it prints, and stops it at its limits."""

    def __init__(self, pid: int, own_ends: tuple[int, ...], request: JSON, requests: int, places: list[str]) -> None:
        self.pid, self.places, self.requests = pid, places, requests
        self.open_ends = list(own_ends)
        self.stdin_end, self.stdin = own_ends[0], memoryview(request.get("stdin", "").encode("utf-8", "surrogateescape"))
        self.numbers = {own_ends[1]: 1, own_ends[2]: 2}
        self.output = {1: bytearray(), 2: bytearray()}
        self.timeout_s, self.memory = request["timeout_s"], int(request.get("memory_mb") or 1024) * MEGABYTE
        self.peak_bytes, self.note = 0, ""
        self.usage = Usage(pid)
        for end in own_ends:
            os.set_blocking(end, False)

    def wait(self) -> str | None:
        """Return when the program has ended (None), or has been killed (the limit's status)."""
        process = os.pidfd_open(self.pid)
        try:
            return self.wait_for(process)
        finally:
            os.close(process)

    def wait_for(self, process: int) -> str | None:
        started, look_s = time.monotonic(), SHORTEST_LOOK_S
        next_look = started + look_s
        poll = select.poll()
        for end in (process, self.requests, *self.numbers):
            poll.register(end, select.POLLIN)
        poll.register(self.stdin_end, select.POLLOUT)
        while True:
            now = time.monotonic()
            ready = {end for end, _ in poll.poll(max(0.0, next_look - now) * 1e3)}
            if self.requests in ready:  # no request comes before the answer: the host has gone
                os._exit(HOST_IS_GONE)
            if self.stdin_end in ready and self.feed():
                poll.unregister(self.stdin_end)
                self.open_ends.remove(self.stdin_end)
                os.close(self.stdin_end)
            for end in ready & set(self.numbers):
                if self.read(end):
                    poll.unregister(end)
            if process in ready:
                return None
            stopped = self.stop_for_output()
            if stopped is None and (now := time.monotonic()) >= next_look:
                stopped = self.limit_reached(now - started)
                look_s = min(2 * look_s, LONGEST_LOOK_S) if self.usage.processes < 2 else SHORTEST_LOOK_S
                next_look = time.monotonic() + look_s
            if stopped:
                os.kill(self.pid, signal.SIGKILL)
                return stopped

    def feed(self) -> bool:
        """Write some stdin; True when there is no more to write, or no process reads it."""
        try:
            self.stdin = self.stdin[os.write(self.stdin_end, self.stdin[:65536]) :]
        except BlockingIOError:
            return False
        except OSError:
            return True
        return not self.stdin

    def read(self, end: int) -> bool:
        """Read once; True at the end of the output."""
        try:
            part = os.read(end, 65536)
        except BlockingIOError:
            return False
        self.output[self.numbers[end]] += part
        return not part

    def read_rest(self) -> None:
        """Read what the pipes still hold; no process writes any more."""
        for end, number in self.numbers.items():
            os.set_blocking(end, True)
            while len(self.output[number]) <= KEPT_OUTPUT and not self.read(end):
                pass

    def limit_reached(self, elapsed_s: float) -> str | None:
        """The status of the limit that the program is over, or None."""
        self.usage.look()
        self.peak_bytes = max(self.peak_bytes, self.usage.memory)
        if self.usage.seconds > self.timeout_s or (elapsed_s > 2 * self.timeout_s and not self.usage.waits_for_processor):
            return self.stop("timeout", f"stopped: it took more than {self.timeout_s} s of processor time, or twice that in all")
        if elapsed_s > (PATIENCE - 1) * self.timeout_s:
            return self.stop(
                "sandbox_error", f"the machine is too busy: {self.usage.seconds:.1f} s of a processor in {elapsed_s:.1f} s"
            )
        if self.usage.memory > self.memory:
            return self.stop("memory_exceeded", f"stopped: it used more than {self.memory // MEGABYTE} MB")
        if self.usage.processes > MOST_PROCESSES:
            return self.stop("runtime_error", f"stopped: it started more than {MOST_PROCESSES} processes")
        files = sum(space.f_files - space.f_ffree for space in map(os.statvfs, self.places)) if ALONE else 0
        if files > MOST_FILES:
            return self.stop("runtime_error", f"stopped: it made more than {MOST_FILES} files")
        return None

    def stop_for_output(self) -> str | None:
        """The status of a program that has printed too much, or None."""
        if all(len(output) <= KEPT_OUTPUT for output in self.output.values()):
            return None
        return self.stop("runtime_error", f"stopped: it printed more than {KEPT_OUTPUT} bytes")

    def stop(self, status: str, note: str) -> str:
        self.note = f"\n{note}\n"
        return status
