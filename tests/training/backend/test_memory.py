"""Peak memory."""

import numpy as np
import psutil

from ludic.training.backend.memory import memory_peaks


def test_the_peak_of_the_process_includes_memory_that_was_freed():
    before = memory_peaks()["process_peak_mb"]
    resident = psutil.Process().memory_info().rss / 2**20
    held = np.ones(int(before - resident + 128) * 2**20 // 8)  # at least 64 MiB above the previous peak
    del held
    after = memory_peaks()["process_peak_mb"]
    assert after >= before + 64
    assert memory_peaks()["process_peak_mb"] >= after
