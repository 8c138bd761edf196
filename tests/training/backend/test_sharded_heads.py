"""Sharded heads, of FSDP2 or cut along the vocabulary, have the log-probabilities and gradients of
all logits of one process. `support/sharded_heads` runs them."""

import json

import pytest
from forked_scripts import run_script

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("sharded heads")]  # they share a run


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `sharded_heads.py` found."""
    out = tmp_path_factory.mktemp("heads") / "found.json"
    run_script("sharded_heads.py", out)
    return json.loads(out.read_text())


def assert_exact(case, ranks):
    for rank in ranks:
        assert rank["skips"], case
        assert rank["largest"] > 1e-2, case
        assert rank["gradients"] <= 1e-6 * max(1.0, rank["largest"]), case


def test_models_sharded_by_fsdp_keep_no_logits_and_have_the_gradients_of_one_process(found):
    first, second = found["fsdp"]
    assert {"tied, blocks", "tied, one", "untied, head of its own", "adapters, one"} < first.keys()
    for case in first:
        assert_exact(case, (first[case], second[case]))
        whole = found["logps"][case.partition(",")[0]]
        assert sum(first[case]["logps"] + second[case]["logps"]) == pytest.approx(sum(whole), rel=1e-6), case


def test_heads_that_are_cut_along_the_vocabulary_have_the_gradients_of_one_process(found):
    first, second = found["tensor parallel"]
    assert {"tied", "untied", "soft cap", "bias", "frozen head"} == first.keys()
    for case in first:
        assert_exact(case, (first[case], second[case]))
        assert (first[case]["local"], second[case]["local"]) == (130, 129)  # of 259 columns
        assert first[case]["logps"] == second[case]["logps"]
        whole = found["logps"][case]  # of two passes
        assert first[case]["logps"] == pytest.approx(whole[: len(whole) // 2], rel=1e-5), case


def test_heads_that_are_cut_in_another_way_use_all_logits_and_one_line_says_so(found):
    for rank in found["refused"]:
        for case, line in {
            "along the width": "the output layer has (Shard(dim=1),); cut its vocabulary over one mesh dimension",
            "over two dimensions": "(Shard(dim=0), Shard(dim=0)); cut its vocabulary over one mesh dimension",
            "with adapters": "the output layer is cut along the vocabulary, and has adapters",
        }.items():
            assert not rank[case]["skips"]
            [warning] = rank[case]["warnings"]
            assert line in warning
