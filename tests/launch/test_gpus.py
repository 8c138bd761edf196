"""Which GPUs of a machine are lent to which process."""

import pytest
from hypothesis import given, strategies as st

from ludic.errors import LaunchError
from ludic.launch.local import GpuPool, find_gpus
from ludic.launch.process import Process


@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from([0, 0.25, 0.5, 1, 2, 3])), max_size=40), st.integers(0, 4))
def test_no_gpu_is_lent_for_more_than_one(requests, count):
    """Processes come and go at random; a refusal changes nothing."""
    pool, holders = GpuPool([str(number) for number in range(count)]), {}
    for number, share in requests:
        name = f"p{number}"
        if name in holders:
            pool.give_back(name)
            del holders[name]
            continue
        load = {gpu: sum(part for gpus, part in holders.values() if gpu in gpus) for gpu in map(str, range(count))}
        fitting = [gpu for gpu in load if load[gpu] + min(share, 1) <= 1]
        process = Process(name, "actor", ("act",), gpus=share)
        if share and len(fitting) < max(1, share):
            with pytest.raises(LaunchError, match="have room"):
                pool.lend(process)
            continue
        variables = pool.lend(process)
        gpus = variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if share else []
        assert bool(variables) == bool(share)
        assert set(gpus) <= set(fitting)
        assert len(gpus) == len(set(gpus)) == (max(1, share) if share else 0)
        holders[name] = gpus, min(share, 1)


def test_gpus_are_those_of_the_environment_or_all_of_the_driver(tmp_path):
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-a,"}) == ["3", "GPU-a"]
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}) == find_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert find_gpus({}, tmp_path / "no driver") == []
    for name in ("0000:07:00.0", "0000:0f:00.0"):
        (tmp_path / name).mkdir()
    assert find_gpus({}, tmp_path) == ["0", "1"]
