"""Configure the test run.

Hypothesis has two profiles: `quick`, the default, draws the same examples in every run;
`LUDIC_HYPOTHESIS=thorough` draws many more.

Waiting OpenMP threads spin briefly, then sleep (see `ludic.cli.app.main`).
"""

import gc
import os
import signal
import tempfile
import time

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # set before torch is imported: spinning threads slow down a busy machine

import pytest
import torch
from hypothesis import settings
from real_redis import redis_log, redis_server
from real_vllm import vllm_server, vllm_server_to_change
from tiny_recipe import tiny

__all__ = ["redis_log", "redis_server", "tiny", "vllm_server", "vllm_server_to_change"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # ignored, for example, in a job that a shell started in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["LUDIC_SERVER_SECRETS"] = tempfile.mkdtemp(
    prefix="ludic-test-secrets-"
)  # keeps tests away from the secrets of real servers

FROZEN = pytest.StashKey[float]()

torch.set_num_threads(1)  # the models of most tests are too small to profit from a second thread


def pytest_collection_modifyitems(items):
    """The longest tests start first: at the end, one process would run them while the others wait.
    Tests for a GPU say why they are skipped elsewhere."""
    items.sort(key=lambda item: item.path.name != "test_learning.py")
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Each test begins with one thread. A command sets the threads of its run, and those after it
    would compete with the other processes of tests, and round otherwise than alone."""
    torch.set_num_threads(1)
    if time.monotonic() > item.session.stash[FROZEN] + 5.0:
        _freeze(item.session)  # what was imported since then, too


def pytest_collection_finish(session):
    """The garbage collector looks at no module or test again, and collects less often: with the
    default of 700 new objects it took a fifteenth of the time of all tests."""
    _freeze(session)
    gc.set_threshold(50_000, 20, 20)


def _freeze(session):
    """Each command collects all garbage (`settle_memory`), a quarter of its time if nothing is
    frozen."""
    gc.collect()
    gc.freeze()
    session.stash[FROZEN] = time.monotonic()


settings.register_profile("quick", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("LUDIC_HYPOTHESIS", "quick"))
