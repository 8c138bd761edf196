"""How the process of a run manages its memory."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import gc, resource
import torch
from ludic.training.freed_memory import YOUNG_OBJECTS, settle_memory
torch.set_num_threads(1)
def step():
    for size in (1, 2, 4):
        kept = [torch.ones(size << 17) for _ in range(32)]
        kept.append(torch.ones(9 << 20))
thresholds = gc.get_threshold()
with settle_memory():
    assert gc.get_freeze_count() > 100_000
    assert gc.get_threshold()[0] == YOUNG_OBJECTS
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(12):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
assert gc.get_freeze_count() == 0
assert gc.get_threshold() == thresholds
"""


def faults(**variables):
    """Page faults of twelve steps that create and free tensors of several sizes, after one such
    step. The heap still grows in a few of them: where its holes are depends on the hash seed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", FAULTS], env={**clean, **variables}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.integration
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_tensors_are_not_returned_to_the_system_unless_variables_say_so():
    returned = faults(MALLOC_TRIM_THRESHOLD_="131072")  # explicit variables take precedence
    assert returned > 100_000
    assert faults() < 0.1 * returned


def test_objects_that_the_program_froze_stay_frozen():
    code = (
        "import gc\nfrom ludic.training.freed_memory import settle_memory\n"
        "gc.freeze()\nfrozen = gc.get_freeze_count()\n"
        "with settle_memory():\n    assert gc.get_freeze_count() == frozen\n"
        "assert gc.get_freeze_count() == frozen > 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
