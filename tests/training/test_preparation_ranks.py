"""Weights and references on two ranks, compared with one process."""

import json

import pytest
from forked_scripts import run_script


@pytest.mark.integration
def test_two_ranks_have_the_gradient_of_one_process_and_fail_together():
    said = json.loads(run_script("maxent_ranks.py").splitlines()[-1])
    for found in said["results"]:
        assert len(found) == 18
        for case, (largest, difference) in found.items():
            assert largest > 1e-3, case
            assert difference < 1e-6 * max(1.0, largest), case
    assert "missing group_id" in said["failed"][1]["error"]
    assert "missing group_id" in said["failed"][0]["error"]
