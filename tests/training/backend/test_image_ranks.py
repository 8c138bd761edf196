"""A model that sees images on two ranks, as replicas and sharded, has the weights of one process;
also where a rank has no image. `support/sharded_images` runs them."""

import json

import pytest
from forked_scripts import ForkedScript

pytestmark = pytest.mark.integration
HANG_S = 300
"""The script takes half a minute on an idle machine."""


def test_weights_on_two_ranks_are_those_of_one_process(tmp_path):
    script = ForkedScript("sharded_images.py", output=tmp_path / "found")
    script.process.join(HANG_S)
    try:
        assert script.process.exitcode == 0, script.said()
    finally:
        script.kill()
    found = json.loads(script.output.read_text())
    assert len(found["cases"]) == 22
    assert all("DistributedDataParallel does not see" in each["refused"] for each in found["refused"])
    for each in found["cases"]:
        (_, tower, who, _), ranks = each["case"], each["ranks"]
        assert max(rank["worst"] for rank in ranks) <= 1e-6, each
        assert (each["moved"] > 1e-3) == (tower in ("trained", "projector")), each
        assert (each["moved"] == 0) == (tower in ("frozen", "lora")), each
        logps, encoded = each["alone"]
        assert ranks[0]["encoded"] == encoded, each
        if who == "one":
            assert sum(rank["logps"][0] for rank in ranks) == pytest.approx(logps[0], rel=1e-5), each
            assert ranks[1]["encoded"] == [None, None]  # a blank picture is no image
