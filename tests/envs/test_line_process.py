"""A process that one thread asks and another ends."""

import io
import os
import threading
import time

import pytest

from ludic.envs.line_process import LineProcess


class Ended:
    """A process whose output ends only after this side has closed its end of the pipe."""

    def __init__(self):
        (read, self._written), (_, write) = os.pipe(), os.pipe()
        self.stdout, self.stdin = io.FileIO(read), io.FileIO(write, "w")

    def kill(self):
        pass

    def wait(self):
        threading.Timer(0.05, os.close, [self._written]).start()
        return -9


def test_a_process_that_another_thread_ends_fails_its_reader_at_once(monkeypatch):
    process, running = LineProcess([], start_timeout_s=20.0, name="it"), Ended()
    monkeypatch.setattr(process, "_spawn", lambda: running)

    def end():
        while process._process is None:
            time.sleep(0.01)
        time.sleep(0.1)  # it waits for the first line now
        process.end()

    ending = threading.Thread(target=end)
    ending.start()
    begun = time.monotonic()
    with pytest.raises(EOFError, match="it ended"):
        process._start()
    assert time.monotonic() - begun < 10
    ending.join()
