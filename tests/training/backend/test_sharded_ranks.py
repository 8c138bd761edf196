"""Sharded models on 1, 2 and 4 ranks: the numbers of one process, files that every number of ranks
reads, and faults that every rank learns of. `support/sharded_runs` runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[2] / "support"

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("sharded ranks")]  # they share a run


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `sharded_runs.py` found."""
    out = tmp_path_factory.mktemp("sharded") / "found.json"
    paths = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(SUPPORT / "sharded_runs.py"), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def test_steps_on_any_number_of_ranks_equal_one_process(found):
    for run, difference in found["equality"].items():
        assert difference["weights"] <= 1e-6, run
        assert difference["loss"] <= 1e-6, run
        assert difference["norm"] <= 1e-5, run
        if run.endswith("again"):
            assert difference == {"weights": 0, "loss": 0, "norm": 0}, run
    assert {"policy 2 again", "policy 4", "policy hybrid 4", "lora 2", "reward 2", "policy whole 2"} < found["equality"].keys()


def test_a_run_goes_on_on_another_number_of_ranks(found):
    assert found["resharding"].keys() == {"sgd 2 to 1", "sgd 2 to 4", "adamw 2 to 2", "sgd 4 to 2", "sgd 1 to 2"}
    for run, difference in found["resharding"].items():
        assert difference["weights"] <= 1e-6, run
        assert difference["loss"] <= 1e-6, run
    assert found["resharding"]["adamw 2 to 2"] == {"weights": 0, "loss": 0, "norm": 0}


def test_a_fault_on_one_rank_is_raised_on_all_and_leaves_the_checkpoint_before(found):
    assert len(found["faults"]) == 5
    for fault, result in found["faults"].items():
        texts = result["errors"]
        assert sum(text.startswith("OSError: [Errno 28] ") for text in texts) == 1, fault
        told = next(text for text in texts if text.startswith("RankError: "))
        assert "OSError: [Errno 28] " in told, fault
        assert result["left"] == ["latest.json", "step_000001"], fault
        assert result["damaged"] == [], fault


@pytest.mark.parametrize("kind", ["policy", "lora"])
def test_the_files_are_plain_and_are_read_by_one_process_and_by_other_ranks(found, kind):
    result = found["files"][kind]
    assert set(result["kinds"]) <= {".json", ".safetensors", ".md"}  # nothing that pickle wrote
    assert result["in one process"]
    assert result["on two ranks of another seed"]
    assert result["undamaged"] == []
    both = [f"optimizer-0000{rank}-of-00002.safetensors" for rank in (1, 2)]
    weights = ["adapter_model.safetensors"] if kind == "lora" else [f"model-0000{rank}-of-00002.safetensors" for rank in (1, 2)]
    assert {*both, *weights} <= set(result["files"])


def test_transformers_opens_the_folder_and_a_changed_byte_in_the_file_of_any_rank_is_found(found):
    assert found["files"]["pretrained"]
    assert found["files"]["exported"]
    assert len(found["files"]["flips"]) == 4
    for name, faults in found["files"]["flips"].items():
        assert faults == [f"the content of {name} has changed"]


def test_a_shallow_checkpoint_has_each_part_once_and_is_read_by_any_number_of_ranks(found):
    result = found["files"]["shallow"]
    parts = [f"weights-0000{rank}-of-00004.safetensors" for rank in (1, 2, 3, 4)]
    assert {"model.shards.json", "config.json", "manifest.json", *parts} <= set(result["files"])
    assert not [name for name in result["files"] if name.startswith("model") and name != "model.shards.json"]
    assert result["elements"] == result["elements of the model"]  # of two copies, one
    assert result["in one process"]
    assert result["on two ranks of another seed"]
    assert result["exported"]
    assert result["undamaged"] == []
    assert result["flips"] == {name: [f"the content of {name} has changed"] for name in parts}


def test_stored_buffers_are_those_of_rank_0(found):
    first, second = found["buffers"]
    assert first["sent"] == second["sent"] == pytest.approx([0.3, -0.5, 0.1, 0.7])
    assert first["stored"] == [[1.0] * 4]  # once, of rank 0, which changed its own to 1
    assert first["home"] == [1.0] * 4
    assert second["home"] == [0.0] * 4  # which is not touched
    assert first["files"] == 2


def test_an_export_needs_a_bucket_and_the_largest_tensor_on_rank_0_and_nothing_elsewhere(found):
    (first, second), (collected, _) = found["exports"]["streamed"], found["exports"]["collected"]
    limit = first["bucket_mb"] + first["largest_mb"]
    assert first["right"]
    assert collected["right"]
    assert collected["extra_mb"] > 0.8 * first["model_mb"] > limit + 5  # the measurement sees a whole model
    assert first["extra_mb"] <= limit + 5  # 5 MB for what the first export of a process allocates
    assert second["extra_mb"] <= 5


def test_of_a_sharded_model_the_adapters_alone_are_gathered_for_a_publisher_that_takes_them(found):
    first, second = found["exports"]["adapters"]
    assert first == {"right": True, "given": 28, "sharded": 0}  # A and B of 7 layers in 2 blocks
    assert second["given"] == 0


def test_an_error_of_the_publisher_is_raised_on_all_ranks(found):
    first, second = found["exports"]["failed"]
    assert first["error"] == "PublishError: the server is gone"
    assert second["error"].startswith("RankError: publishing weights failed on rank 0")
    assert second["error"].endswith("PublishError: the server is gone")


@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_a_start_from_slices_computes_the_same(model, found):
    starts = found["starts"][model]
    for whole, slices in zip(starts["whole"], starts["slices"], strict=True):
        assert slices["tied"] == (model == "dense")
        assert slices["logits"] == whole["logits"]
        assert slices["norm"] == whole["norm"]


def test_the_gradient_of_every_preset_is_that_of_one_process(found):
    from ludic.training.presets import PRESETS

    assert found["presets"].keys() == {"2", "4", "2, of rows", "4, of rows"}
    for ranks, results in found["presets"].items():
        assert results.keys() == PRESETS.keys()
        for name, (largest, difference) in results.items():
            assert largest > 1e-4, name
            assert difference <= 1e-6 * max(1.0, largest), (ranks, name)


def test_rows_that_several_ranks_compute_have_the_loss_and_gradient_of_one_process(found):
    assert found["contexts"].keys() == {"2 of 2", "4 of 4", "2 of 4"}
    for ranks, results in found["contexts"].items():
        assert len(results) == 21
        for name, (largest, difference, loss) in results.items():
            assert largest > 0.1, name
            assert difference <= 1e-6 * max(1.0, largest), (ranks, name)
            assert loss <= 1e-6, (ranks, name)


def test_a_model_that_was_used_before_its_optimizer_is_trained_whole(found):
    """A reference that is the policy is scored before, and routers are looked for."""
    assert found["used"].keys() == {"scored", "routed"}
    for kind, used in found["used"].items():
        assert used["moved"] > 0.01, kind
        assert used["difference"] <= 1e-6, kind
