"""How a server receives weights: pushes are staged and validated, without the trainer's
dependencies."""

import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file
from stub_weight_server import SHAPES, same, weights

from ludic.inference.vllm.in_server.weight_fingerprint import SAMPLED_ELEMENTS, fingerprint, tensor_fingerprint
from ludic.inference.vllm.in_server.weight_receiver import (
    Checkpoint,
    WeightReceiver,
    WeightTransferError,
    neighbours,
    open_store,
)

QUERY, KEY = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


def folder_with(tmp_path, name, tensors):
    folder = tmp_path / name
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def receiver(tmp_path):
    return WeightReceiver(Checkpoint(folder_with(tmp_path, "own", weights(0))))


def test_the_receiver_needs_none_of_the_trainers_dependencies():
    """The server's environment has vLLM, torch and safetensors."""
    absent = [
        "openai",
        "msgspec",
        "tenacity",
        "transformers",
        "requests",
        "httpx2",
        "peft",
        "rich",
        "typer",
        "hydra",
        "ludic._core",
    ]
    code = f"""
import sys
sys.modules.update({{name: None for name in {absent!r}}})
import ludic.inference.vllm.in_server.weight_receiver, ludic.inference.vllm.in_server.weight_fingerprint
print(*sorted(name for name in sys.modules if name.startswith('ludic.training')))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_shapes_and_dtypes_of_a_checkpoint_are_read_without_its_tensors(tmp_path):
    stored = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4)}
    checkpoint = Checkpoint(folder_with(tmp_path, "c", stored))
    assert checkpoint.weights == {"a": {"shape": [2, 3], "dtype": "bfloat16"}, "b": {"shape": [4], "dtype": "float32"}}
    assert dict(checkpoint.read(["b"])).keys() == {"b"}


def test_an_index_cannot_name_files_outside_its_folder(tmp_path):
    folder = folder_with(tmp_path, "c", weights(0))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../own/model.safetensors"}}')
    with pytest.raises(WeightTransferError, match="outside its folder"):
        Checkpoint(folder)
    with pytest.raises(WeightTransferError, match="not a folder here"):
        Checkpoint(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightTransferError, match=r"holds no \*\.safetensors"):
        Checkpoint(tmp_path / "empty")


def test_a_push_is_applied_once_and_leaves_its_fingerprint(receiver, tmp_path):
    receiver.start()
    receiver.read(str(folder_with(tmp_path, "new", weights(1))))
    assert receiver.staged == len(SHAPES)
    assert same(dict(receiver.take()), weights(1))
    assert receiver.fingerprints == fingerprint(weights(1))
    assert (receiver.take(), receiver.open) == ([], False)


def test_a_discarded_push_loads_nothing(receiver, tmp_path):
    receiver.start()
    receiver.read(str(folder_with(tmp_path, "new", weights(1))))
    receiver.discard()
    assert not receiver.open
    assert receiver.take() == []
    assert receiver.fingerprints == {}


def test_an_emptied_push_is_open_until_it_is_taken_and_loads_nothing(receiver, tmp_path):
    receiver.start()
    receiver.read(str(folder_with(tmp_path, "new", weights(1))))
    receiver.empty()
    assert (receiver.staged, receiver.open) == (0, True)
    assert receiver.take() == []
    assert not receiver.open
    assert receiver.fingerprints == {}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({QUERY: torch.zeros(4, 5)}, r"shape \[4, 5\], .*is \[4, 4\]"),
        ({"other": torch.zeros(1)}, "no weight 'other'"),
    ],
)
def test_weights_that_do_not_match_the_model_are_refused(receiver, tmp_path, changed, message):
    receiver.start()
    with pytest.raises(WeightTransferError, match=message):
        receiver.read(str(folder_with(tmp_path, "new", {**weights(1), **changed})))
    assert (receiver.staged, receiver.open) == (0, False)


def test_missing_parts_of_a_fused_layer_come_from_the_servers_checkpoint(receiver, tmp_path):
    """A server fuses queries, keys and values. If only a part were loaded, the rest would be
    uninitialised memory."""
    receiver.start()
    receiver.read(str(folder_with(tmp_path, "new", {QUERY: weights(1)[QUERY]})))
    assert same(dict(receiver.take()), {QUERY: weights(1)[QUERY], KEY: weights(0)[KEY]})
    receiver.start()
    receiver.read(str(folder_with(tmp_path, "newer", {QUERY: weights(2)[QUERY]})))
    assert same(dict(receiver.take()), {QUERY: weights(2)[QUERY], KEY: weights(0)[KEY]})


def test_layers_are_distinguished_by_their_names():
    names = ["model.layers.1.a.weight", "model.layers.10.a.weight", "model.layers.1.mlp.experts.10.up.weight", "model.norm.weight", "lm_head.weight"]  # fmt: skip  # noqa: E501
    assert neighbours(dict.fromkeys(names), {"model.layers.1.a.weight": 0}) == [names[0], names[2]]
    assert neighbours(dict.fromkeys(names), {"lm_head.weight": 0}) == ["lm_head.weight"]


def test_nothing_is_received_without_a_connection(receiver):
    with pytest.raises(WeightTransferError, match="no trainer is connected"):
        receiver.receive(["a"], ["float32"], [[1]])


def test_only_torch_dtypes_are_accepted(receiver):
    receiver.checkpoint = None
    receiver._group, receiver.group_id = Group(), "g"
    with pytest.raises(WeightTransferError, match="'save' is not a dtype"):
        receiver.receive(["a"], ["save"], [[1]])
    assert receiver.group_id is None  # the stream stopped in the middle, so the trainer must reconnect


class Group:
    def abort(self):
        pass


def test_the_store_listens_on_one_address_only():
    _, port = open_store("127.0.0.1", 2, timedelta(seconds=5))
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.2", port))


def connection(port, timeout_s):
    return {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank": 1,
        "world_size": 2,
        "timeout_s": timeout_s,
        "group_id": "g",
    }


@pytest.mark.parametrize("listener", ["silent", "a store that nobody joins", "nobody"])
def test_connecting_ends_at_its_deadline_whatever_listens(receiver, listener):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        if listener == "silent":
            silent.listen(1)
        if listener == "a store that nobody joins":
            _store, port = open_store("127.0.0.1", 2, timedelta(seconds=5))
        with pytest.raises(RuntimeError) as raised:
            receiver.connect(**connection(port, 1.0))
    assert "did not answer within 1 s" in str(raised.value) or "wait timeout after 1000ms" in str(raised.value)
    if listener == "silent":
        assert isinstance(raised.value, WeightTransferError)
        assert f"127.0.0.1:{port} did not answer within 1 s" in str(raised.value)
    assert receiver.group_id is None


@pytest.mark.parametrize("time_around", [0, *(pytest.param(time, marks=pytest.mark.integration) for time in (1, 2))])
def test_a_script_whose_last_line_closes_the_connection_exits_cleanly(time_around):
    """If the server is another process, freeing the group takes milliseconds, and Python must not
    exit before that."""
    closing_trainer = Path(__file__).parents[3] / "support" / "closing_trainer.py"
    done = subprocess.run([sys.executable, closing_trainer], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@given(st.lists(st.integers(0, 6), min_size=0, max_size=3), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_equal_bytes_shape_and_dtype_give_equal_fingerprints(shape, dtype):
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).to(dtype)
    assert tensor_fingerprint(tensor) == tensor_fingerprint(tensor.clone())
    assert tensor_fingerprint(tensor) != tensor_fingerprint(tensor.reshape(1, *shape))
    assert tensor_fingerprint(tensor.to(torch.float64)) != tensor_fingerprint(tensor)
    if tensor.ndim == 2:
        assert tensor_fingerprint(tensor.T.contiguous().T) == tensor_fingerprint(tensor)
    if tensor.numel():
        assert tensor_fingerprint(tensor + 1) != tensor_fingerprint(tensor)


def test_a_fingerprint_covers_elements_from_all_of_a_large_tensor():
    large = torch.zeros(4 * SAMPLED_ELEMENTS)
    marks = {tensor_fingerprint(large)}
    for place in (0, 2 * SAMPLED_ELEMENTS, 4 * (SAMPLED_ELEMENTS - 1)):
        other = large.clone()
        other[place] = 1
        marks.add(tensor_fingerprint(other))
    assert len(marks) == 4
