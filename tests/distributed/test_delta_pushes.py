"""Pushes of what changed: servers have the trainer's bits after each, and a delta that is lost,
repeated, out of order or damaged is never served."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from benches.python.delta_pushes import Comparison, train
from gathered import Gathered
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors.torch import save_file
from stub_weight_server import SHAPES, Refused, StubWeightServer, refuse, same, weights

from ludic.distributed import create_vllm_publisher
from ludic.distributed.push.delta import LastPush, write_delta
from ludic.errors import PublishError
from ludic.inference.vllm.in_server import weight_receiver
from ludic.inference.vllm.in_server.weight_receiver import DELTA_FILE, Checkpoint, WeightReceiver, WeightTransferError

NAMES = list(SHAPES)
NORM = "model.norm.weight"


def near(version):
    """Weights of which each version changes a few entries of one tensor, from those before."""
    tensors = weights(0)
    for step in range(1, version + 1):
        flat = tensors[NAMES[step % len(NAMES)]].view(-1)
        flat[step % len(flat) :: 7] += 0.5
    return tensors


def publisher(*servers, **options):
    return create_vllm_publisher([server.url for server in servers], **{"timeout_s": 5.0, **options})


def pushes(server):
    """Of each push that began, whether it was a delta."""
    return ["delta" in body["update_info"] for path, body in server.calls if path == "/update_weights"]


def serves(server, version, expected):
    assert same(server.served, expected)
    assert (server.version, server.paused, server.active) == (str(version), None, False)
    assert not server.cache_is_stale


@pytest.mark.parametrize("backend", ["gloo", "disk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_after_the_first_push_only_what_changed_is_sent(start, tmp_path, backend, dtype):
    kind = getattr(torch, dtype)
    servers = [start(backend=backend, dtype=dtype, first=weights(0, kind)) for _ in range(2)]
    push = publisher(*servers, **({"directory": tmp_path / "shared"} if backend == "disk" else {}))
    whole = sum(tensor.nbytes for tensor in weights(0, kind).values())
    for version in range(1, 6):
        push.publish(near(version), version=version)
        for server in servers:
            serves(server, version, {name: tensor.to(kind) for name, tensor in near(version).items()})
        assert (push.pushed_bytes == whole) if version == 1 else (0 < push.pushed_bytes < whole / 4)
    assert [pushes(server) for server in servers] == [[False, True, True, True, True]] * 2


def test_a_tensor_of_another_layer_is_not_loaded(start):
    server = start()
    push = publisher(server)
    push.publish(near(1), version=1)
    changed = {**near(1), NORM: near(1)[NORM] + 0.5}
    taken, take = [], server.receiver.take
    server.receiver.take = lambda: taken.append(take()) or taken[-1]
    push.publish(changed, version=2)
    assert [name for name, _ in taken[0]] == [NORM]
    serves(server, 2, changed)


def test_special_values_and_signs_of_zero_keep_their_bits(start):
    server = start()
    push = publisher(server)
    first = {**weights(1), NORM: torch.tensor([float("nan"), 0.0, float("inf"), 1e-45])}
    second = {**weights(1), NORM: torch.tensor([0x7FC00001, -(2**31), 0x7F800001, 1], dtype=torch.int32).view(torch.float32)}
    push.publish(first, version=1)
    push.publish(second, version=2)
    assert pushes(server) == [False, True]
    assert torch.equal(server.served[NORM].view(torch.int32), second[NORM].view(torch.int32))


def test_weights_that_all_changed_are_sent_whole(start):
    server = start()
    push = publisher(server)
    for version in (1, 2):
        push.publish(weights(version), version=version)
        serves(server, version, weights(version))
    assert pushes(server) == [False, False]
    push.publish({**weights(2), NORM: weights(3)[NORM]}, version=3)
    assert pushes(server) == [False, False, True]
    serves(server, 3, {**weights(2), NORM: weights(3)[NORM]})


def test_whole_pushes_on_request_keep_nothing_at_the_server(start):
    server = start()
    push = publisher(server, push="whole")
    for version in (1, 2):
        push.publish(near(version), version=version)
        serves(server, version, near(version))
    assert pushes(server) == [False, False]
    assert server.receiver.base_id is None
    with pytest.raises(ValueError, match=r"push \('all'\) must be 'auto' or 'whole'"):
        publisher(server, push="all")


def test_gathered_weights_are_gathered_once_for_a_delta(start):
    server = start()
    push = publisher(server)
    for version, passes in ((1, 2), (2, 1), (3, 1)):
        source = Gathered(near(version))
        push.publish_stream(source, version=version)
        serves(server, version, near(version))
        assert source.gathered == NAMES * passes
    assert pushes(server) == [False, True, True]


def test_frozen_weights_of_a_fused_layer_are_loaded_with_what_changed(start):
    server = start()
    push = publisher(server, partial=True)
    for version in range(1, 9):
        push.publish({name: near(version)[name] for name in NAMES[1:]}, version=version)
        serves(server, version, {**near(version), NAMES[0]: weights(0)[NAMES[0]]})
    assert any(pushes(server))


def test_a_restarted_server_gets_all_weights(start):
    servers = [start(), start()]
    push = publisher(*servers)
    push.publish(near(1), version=1)
    servers[1].restart()
    for version in (2, 3):
        push.publish(near(version), version=version)
        for server in servers:
            serves(server, version, near(version))
    assert pushes(servers[0]) == [False, False, True]


def test_a_second_trainer_pushes_all_weights_and_the_first_notices(start):
    server = start()
    one, two = publisher(server), publisher(server)
    one.publish(near(1), version=1)
    two.publish(near(5), version=5)
    one.publish(near(2), version=2)
    serves(server, 2, near(2))
    assert pushes(server) == [False, False, False]


def lose_base(server, _):
    server.receiver._forget_base()


def damage(server, body):
    path = Path(body["update_info"]["path"], DELTA_FILE)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(server, body):
    path = Path(body["update_info"]["path"], DELTA_FILE)
    path.write_bytes(path.read_bytes()[:-1])


def mix_up(server, body):
    body["update_info"]["delta"]["base"] = "0" * 32


@pytest.mark.parametrize("fault", [lose_base, damage, cut, mix_up])
def test_a_refused_delta_is_followed_by_all_weights_in_the_same_push(start, tmp_path, caplog, fault):
    servers = [start(backend="disk"), start(backend="disk")]
    push = publisher(*servers, directory=tmp_path / "shared")
    push.publish(near(1), version=1)

    def once(body):
        servers[1].faults.clear()
        fault(servers[1], body)

    servers[1].faults["/update_weights"] = once
    push.publish(near(2), version=2)
    for server in servers:
        serves(server, 2, near(2))
        assert pushes(server) == [False, True, False]
    assert "is pushed whole" in caplog.text
    push.publish(near(3), version=3)
    assert pushes(servers[1])[-1] is True
    serves(servers[1], 3, near(3))


@pytest.mark.parametrize("failing", ["/update_weights", "/pause"])
def test_a_delta_that_one_server_cannot_take_is_undone_on_the_others(start, failing):
    servers = [start(), start()]
    push = publisher(*servers)
    push.publish(near(1), version=1)
    servers[1].faults[failing] = refuse("a fault")
    with pytest.raises(PublishError, match="a fault"):
        push.publish(near(2), version=2)
    for server in servers:
        serves(server, 1, near(1))
    servers[1].faults.clear()
    push.publish(near(3), version=3)
    for server in servers:
        serves(server, 3, near(3))
    assert pushes(servers[0]) == [False, True, True]


def test_a_server_whose_interpreter_cannot_load_the_extension_gets_all_weights(start, monkeypatch):
    monkeypatch.setattr(weight_receiver, "find_delta_codec", lambda: None)
    server = start()
    push = publisher(server)
    for version in (1, 2):
        push.publish(near(version), version=version)
        serves(server, version, near(version))
    assert pushes(server) == [False, False]


PUSH = ["/start_weight_update", "/update_weights", "/pause", "/finish_weight_update", "/reset_prefix_cache", "/resume"]


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    with StubWeightServer(folder / "a") as one, StubWeightServer(folder / "b") as two:
        yield one, two


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(failing=st.sampled_from(PUSH), after=st.booleans(), who=st.integers(0, 1))
def test_after_any_fault_of_a_delta_a_server_serves_the_old_version_the_new_one_or_nothing(two_servers, failing, after, who):
    """`after`: the server executes the step, and its response is lost."""
    for server in two_servers:
        server.faults.clear()
        server.restart()
    push = publisher(*two_servers)
    push.publish(near(1), version=1)
    unlucky = two_servers[who]

    def fault(body):
        unlucky.faults.clear()
        if after:
            getattr(unlucky, "on_" + failing.strip("/"))({"mode": ["keep"], "reset_running_requests": ["true"]}, body)
        raise Refused(500, "a fault")

    unlucky.faults[failing] = fault
    with pytest.raises(PublishError, match="a fault"):
        push.publish(near(2), version=2)
    for server in two_servers:
        assert server.paused is None or server is unlucky
        if server.paused is None:
            serves(server, server.version, near(int(server.version)))
    if unlucky.paused is not None:
        unlucky.restart()
    for version in (3, 4):
        push.publish(near(version), version=version)
        for server in two_servers:
            serves(server, version, near(version))


class DeltasInAnyOrder(RuleBasedStateMachine):
    """A trainer makes versions, each with a delta from the one before and as a whole. A receiver is
    given any of them, in any order, again, or damaged, and loads what it has staged or not."""

    @initialize()
    def begin(self):
        self.root = Path(tempfile.mkdtemp())
        (self.root / "model").mkdir()
        save_file(weights(0), self.root / "model" / "model.safetensors")
        self.last, self.versions, self.deltas = LastPush(), [], []
        self.held = {}
        self.restart()
        self.add_version()

    def teardown(self):
        shutil.rmtree(self.root, ignore_errors=True)

    @rule()
    def restart(self):
        """As after a crash: it has the weights of its own checkpoint."""
        self.receiver = WeightReceiver(Checkpoint(self.root / "model"))
        self.served, self.served_id = weights(0), None

    @rule()
    def add_version(self):
        new, folder = near(len(self.versions) + 1), self.root / f"version_{len(self.versions)}"
        folder.mkdir()
        save_file(new, folder / "model.safetensors")
        delta = self.last.start_delta(new)
        if delta is None:
            self.last.replace(new)
            for name, tensor in new.items():
                self.last.copy(name, tensor)
            self.last.confirm("version 0")
        else:
            for name, tensor in new.items():
                delta.add(name, tensor)
            header, changes = delta.seal()
            write_delta(folder, changes)
            self.deltas.append((header, delta.push_id, folder))
            self.last.confirm(delta.push_id, delta)
        self.versions.append((self.last.push_id, new, folder))

    def finish(self, push_id, load):
        if not load:
            self.receiver.discard()
            return
        for name, tensor in self.receiver.take():
            self.served[name] = tensor.clone()
        self.served_id = push_id

    @rule(data=st.data(), load=st.booleans())
    def push_whole(self, data, load):
        push_id, _, folder = data.draw(st.sampled_from(self.versions))
        self.receiver.start()
        self.receiver.read(str(folder), push_id)
        assert self.receiver.base_id is None  # until it is loaded
        self.finish(push_id, load)

    @precondition(lambda self: self.deltas)
    @rule(data=st.data(), load=st.booleans(), damaged=st.booleans())
    def push_delta(self, data, load, damaged):
        fitting = [each for each in self.deltas if each[0]["base"] == self.receiver.base_id]
        header, push_id, folder = data.draw(st.sampled_from(fitting + self.deltas))
        base = self.receiver.base_id
        if damaged:
            folder = self.damage(data, header, folder)
        self.receiver.start()
        if damaged or header["base"] != base:
            with pytest.raises(WeightTransferError, match="push all weights"):
                self.receiver.receive_delta(header, push_id, str(folder))
            assert self.receiver.base_id is None
            assert self.receiver.take() == []
            return
        self.receiver.receive_delta(header, push_id, str(folder))
        self.finish(push_id, load)

    def damage(self, data, header, folder):
        copied = self.root / "damaged"
        copied.mkdir(exist_ok=True)
        content = bytearray((folder / DELTA_FILE).read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[place] ^= data.draw(st.integers(1, 255))
        else:
            del content[place]
        (copied / DELTA_FILE).write_bytes(content)
        return copied

    @invariant()
    def it_serves_a_version_and_keeps_one_or_nothing(self):
        known = {push_id: new for push_id, new, _ in getattr(self, "versions", [])}
        if self.served_id is not None:
            assert same(self.served, known[self.served_id])
        if self.receiver.base_id is not None:
            assert self.receiver.base_id == self.served_id
            assert same(self.receiver._base, known[self.served_id])


TestDeltasInAnyOrder = DeltasInAnyOrder.TestCase
TestDeltasInAnyOrder.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


def test_a_hundred_steps_of_grpo_reach_a_server_bit_for_bit(tmp_path):
    """The comparison fails if the server that is sent what changed has other bits than the one that
    is sent all, or the trainer."""
    comparison, versions = Comparison(tmp_path), []

    def push(step, trained):
        comparison.push(step, trained)
        versions.append(step)
        expected = {name: weight.to(torch.bfloat16) for name, weight in trained.items()}
        assert same(comparison.servers[0].served, expected)

    small = {"rollout.prompts": 1, "task.args.max_new_tokens": 8}
    train(1e-5, 100, push, hidden_size=64, layers=1, **small)
    comparison.close()
    assert versions == list(range(1, 101))
    assert pushes(comparison.servers[0]) == [False] + [True] * 99
    assert all(share < 0.5 for _, share, *_ in comparison.rows)
