"""Peaks of memory."""

import numpy as np

from ludic.training.backend.memory import memory_peaks


def test_the_peak_of_the_process_holds_what_was_allocated_and_freed():
    before = memory_peaks()["process_peak_mb"]
    held = np.ones(int(before + 64) * 2**20 // 8)  # 64 MiB more than there ever was
    del held
    after = memory_peaks()["process_peak_mb"]
    assert after >= before + 64
    assert memory_peaks()["process_peak_mb"] >= after
