"""Safetensors files written by the tensor: `safetensors` reads them, and parts are found again."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from ludic.errors import CheckpointError
from ludic.models.tensor_files import DTYPES, OFFSETS, StoredTensors, TensorFileWriter


def write(path, tensors, *, offsets=None):
    metadata = None if offsets is None else {OFFSETS: json.dumps(offsets)}
    with TensorFileWriter(path, tensors, metadata=metadata) as file:
        for name, tensor in reversed(tensors.items()):
            file.write(name, tensor)


def test_safetensors_reads_tensors_of_every_type_and_shape(tmp_path):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (3, 5, 8), dtype=torch.uint8, generator=generator)
    tensors = {name: (noise > 9 if dtype == torch.bool else noise.view(dtype)) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "column": torch.arange(12.0).view(3, 4)[:, 1]}
    write(tmp_path / "model.safetensors", tensors)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert loaded[name].reshape(-1).view(torch.uint8).equal(tensor.contiguous().reshape(-1).view(torch.uint8))
        assert loaded[name].data_ptr() % tensor.dtype.itemsize == 0
    assert (tmp_path / "model.safetensors").stat().st_size % 8 == sum(t.nbytes for t in tensors.values()) % 8


def test_a_tensor_in_parts_is_read_whole_and_in_other_parts(tmp_path):
    whole = torch.arange(35.0).view(7, 5)
    step = torch.tensor(4)
    write(tmp_path / "1.safetensors", {"w": whole[:3], "step": step}, offsets={"w": [0, 0]})
    write(tmp_path / "2.safetensors", {"w": whole[3:]}, offsets={"w": [3, 0]})
    with StoredTensors([tmp_path / "1.safetensors", tmp_path / "2.safetensors"]) as stored:
        assert {name: like.shape for name, like in stored.describe().items()} == {"w": (7, 5), "step": ()}
        assert stored.read("w").equal(whole)
        assert stored.read("step").equal(step)
        assert stored.read("w", ((2, 6), (1, 4))).equal(whole[2:6, 1:4])
        assert stored.read("w", ((3, 7), (0, 5))).equal(whole[3:])
        assert stored.read("w", ((7, 7), (0, 5))).shape == (0, 5)


def test_a_tensor_of_which_a_part_is_missing_is_not_read(tmp_path):
    write(tmp_path / "2.safetensors", {"w": torch.ones(4, 5)}, offsets={"w": [3, 0]})
    with (
        StoredTensors([tmp_path / "2.safetensors"]) as stored,
        pytest.raises(CheckpointError, match=r"w is not whole: .* 20 of 35"),
    ):
        stored.read("w")


def test_the_index_says_which_of_two_files_has_a_tensor(tmp_path):
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "2.safetensors")
    places = {"a": "1.safetensors", "b": "2.safetensors"}
    with StoredTensors([tmp_path / "1.safetensors", tmp_path / "2.safetensors"], places=places) as stored:
        assert stored.read("b").tolist() == [1, 1]


def test_tensors_that_the_layout_does_not_have_and_missing_ones_are_errors(tmp_path):
    path, like = tmp_path / "model.safetensors", torch.zeros(2, 3)
    with (
        pytest.raises(CheckpointError, match=r"w is torch\.float32 of shape \(3,\)"),
        TensorFileWriter(path, {"w": like}) as file,
    ):
        file.write("w", torch.zeros(3))
    with pytest.raises(CheckpointError, match="w was not written to"), TensorFileWriter(path, {"w": like}):
        pass


def test_a_file_that_is_cut_off_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, {"w": torch.ones(100)})
    os.truncate(path, 300)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        StoredTensors([path])
