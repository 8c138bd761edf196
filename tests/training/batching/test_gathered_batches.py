"""A source for each rank, all samples on all ranks: the run is that of one process with all of
them."""

import asyncio
import re

import pytest
from rank_processes import on_two_ranks
from ranks_gathered import RUNS, STEPS, OwnSource, make_answers
from safetensors.torch import load_file
from training_samples import assert_same_tensors

from ludic.training import GatheredBatches


@pytest.mark.integration
def test_runs_on_two_ranks_with_a_source_each_are_those_of_one_process_and_resume_exactly(tmp_path):
    [first, second] = on_two_ranks("ranks_gathered.py", tmp_path)
    for name, make in RUNS.items():
        trainer = make(tmp_path / "alone" / name, OwnSource)
        stats = [trainer.train_step_sync() for _ in range(STEPS)]
        losses = [each["train/loss"] for each in stats]
        for rank in (first, second):
            assert rank[name]["losses"] == pytest.approx(losses, abs=1e-6, rel=1e-5), name
            assert rank[name]["resumed"], name
            assert rank[name]["stats"]["train/num_samples"] == stats[-1]["train/num_samples"]
            assert 0 < rank[name]["stats"]["ranks/lockstep"] <= 1
        assert first[name]["state"] == {"position": STEPS, "begin": 0}
        assert second[name]["state"] == {"position": STEPS, "begin": 4}
        newest = max((tmp_path / name).glob("step_*"))
        weights = load_file(newest / "model.safetensors")
        reference = load_file(tmp_path / "alone" / name / newest.name / "model.safetensors")
        assert_same_tensors(weights, reference, atol=1e-6)
    check_errors(first["errors"], second["errors"])
    [warning] = first["warnings"]
    assert re.search("^Scripted .*2 ranks .*its own samples", warning)
    assert second["warnings"] == []
    assert re.search("SameOnAll .*2 ranks .*same samples; use SharedBatches", first["refusal"])


def check_errors(first, second):
    """What nine calls gave on two ranks; the source works on after each error."""
    assert first[0] == second[0] == 8
    assert first[1][:2] == second[1][:2] == ["RequestsExhausted", "none left"]
    assert first[1][2].startswith("raised by rank 1, on ")
    assert [first[2][1], second[2][1]] == ["bad data of rank 0", "bad data of rank 1"]
    assert first[3] == second[3]
    assert first[3][0] == "DataError"
    assert re.search("group 0 .*ranks 0 and 1; .*other names", first[3][1])
    assert first[4][:2] == second[4][:2]
    assert "meta of the batch cannot be sent" in first[4][1]
    assert first[5][:2] == second[5][:2] == ["StopRequested", "enough"]
    assert (first[6], second[7]) == (["CancelledError", ""], ["KeyboardInterrupt", ""])
    for other, rank in ((second[6], 0), (first[7], 1)):  # told, and not left until a deadline
        assert other[0] == "RankError"
        assert other[1].startswith(f"rank {rank}, on ")
        assert other[1].endswith(", was interrupted (without a message)")
    assert first[8] == second[8] == 8


def test_on_one_rank_it_is_the_inner_source():
    inner = OwnSource(make_answers)
    source = GatheredBatches(inner)
    batch = asyncio.run(source.next_batch())
    assert isinstance(batch.items[0].input_ids, list)  # nothing was encoded
    assert source.state_dict() == {"position": 1, "begin": 0}
    source.load_state_dict({"position": 4, "begin": 0})
    assert inner.position == 4
    assert (source.max_lag, source.overlaps) == (0, False)
