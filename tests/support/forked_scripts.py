"""Scripts as processes forked from a server that has imported everything: an import of torch takes
seconds. Each is as after `python SCRIPT ARGUMENT...`."""

import os
import runpy
import sys
import tempfile
import time
from pathlib import Path

from forkserver import FORKSERVER

SUPPORT = Path(__file__).parent
PATIENCE_S = 600.0
"""A busy machine is slow; only a hang takes longer."""


class ForkedScript:
    """A script of tests/support that runs. Its output is in the files `output` and `errors`."""

    def __init__(self, script, *arguments, output):
        self.output, self.errors = Path(output), Path(f"{output}.errors")
        self.output.touch()
        self.errors.touch()
        given = [str(SUPPORT / script), *map(str, arguments)]
        self.process = FORKSERVER.Process(target=_run, args=(given, str(self.output), str(self.errors)))
        self.process.start()

    def wait_for_lines(self, count):
        """The first `count` lines of its output, as soon as it has written them."""
        deadline = time.monotonic() + PATIENCE_S
        while (written := self.output.read_text()).count("\n") < count:
            assert self.process.is_alive(), self.said()
            assert time.monotonic() < deadline, f"it does not write line {count}"
            time.sleep(0.002)
        return written.splitlines()[:count]

    def said(self):
        return self.output.read_text() + self.errors.read_text()

    def end(self):
        """Wait for its end. Returns its exit status, which is None if it hangs."""
        self.process.join(PATIENCE_S)
        return self.process.exitcode

    def kill(self):
        self.process.kill()
        self.process.join()


def run_script(script, *arguments):
    """Run a script, which must succeed, and return its output."""
    with tempfile.TemporaryDirectory() as folder:
        running = ForkedScript(script, *arguments, output=Path(folder) / "output")
        try:
            assert running.end() == 0, running.said()
        finally:
            running.kill()  # nothing, unless it hangs
        return running.output.read_text()


def _run(given, *streams):
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    sys.argv = given
    runpy.run_path(given[0], run_name="__main__")
