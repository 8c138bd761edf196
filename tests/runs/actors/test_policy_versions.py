"""Versions of the policy in a run's folder: what is kept, what is deleted, what is refused."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from ludic.errors import PublishError
from ludic.runs.actors.policy_versions import PolicyVersions, list_versions, read_version


def weights_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_version_is_read_as_it_was_published(tmp_path: Path):
    model = torch.nn.Linear(3, 2)
    PolicyVersions(tmp_path).publish(weights_of(model), version=7)
    read = read_version(tmp_path, 7, model)
    assert all(torch.equal(read[name], tensor) for name, tensor in weights_of(model).items())
    with pytest.raises(FileNotFoundError):
        read_version(tmp_path, 8, model)


def test_a_version_without_all_weights_of_the_model_is_refused(tmp_path: Path):
    model = torch.nn.Linear(3, 2)
    weights = weights_of(model)
    dropped = sorted(weights)[0]
    PolicyVersions(tmp_path).publish({name: tensor for name, tensor in weights.items() if name != dropped}, version=1)
    with pytest.raises(PublishError, match=f"lacks {dropped}"):
        read_version(tmp_path, 1, model)


def test_a_damaged_version_is_named(tmp_path: Path):
    PolicyVersions(tmp_path).publish(weights_of(torch.nn.Linear(3, 2)), version=1)
    (tmp_path / "version_1" / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(PublishError, match="version_1"):
        read_version(tmp_path, 1, torch.nn.Linear(3, 2))


def test_a_resumed_run_begins_without_later_versions_and_leftovers(tmp_path: Path):
    versions = PolicyVersions(tmp_path)
    for number in (3, 4, 5):
        versions.publish({"x": torch.zeros(1)}, version=number)
    (tmp_path / ".unfinished_version_6").mkdir()
    PolicyVersions(tmp_path).begin(4)
    assert list_versions(tmp_path) == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version_3", "version_4"]


@given(st.sets(st.integers(0, 12)), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=3))
def test_what_is_in_no_range_is_deleted(tmp_path_factory, numbers, ranges):
    root = tmp_path_factory.mktemp("policy")
    for number in numbers:
        (root / f"version_{number}").mkdir()
    PolicyVersions(root).keep_only(ranges)
    assert list_versions(root) == sorted(number for number in numbers if any(number in range(a, b + 1) for a, b in ranges))
