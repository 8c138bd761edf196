"""A push to vLLM servers: what they serve before, during and after it, when it succeeds and when
any step fails."""

import logging
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from gathered import Gathered
from hypothesis import HealthCheck, given, settings, strategies as st
from stub_weight_server import Refused, StubWeightServer, refuse, same, weights

from ludic.distributed import BroadcastPolicyPublisher, VllmControlPlane, VllmTensorCommunicator, create_vllm_publisher
from ludic.distributed.adapters.vllm import VllmPublisherAdapter
from ludic.distributed.publisher import MOST_IN_A_ROW
from ludic.distributed.push import server_link
from ludic.distributed.push.target import as_push_target, complete_before_interrupt
from ludic.errors import LudicError, PublishError
from ludic.inference.servers.server_secret import remove_secret, store_secret
from ludic.inference.vllm.client import VLLMChatClient

PUSH = [
    "/start_weight_update",
    "/update_weights",
    "/pause",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/reset_encoder_cache",
    "/collective_rpc:ludic_fingerprint",
    "/resume",
]


def publisher(*servers, **options):
    return create_vllm_publisher([server.url for server in servers], **{"timeout_s": 5.0, **options})


def serves(server, version, seed):
    """Assert that the server serves these weights under this version, without stale cache and
    unpaused."""
    assert same(server.served, weights(seed))
    assert (server.version, server.paused, server.active) == (version, None, False)
    assert not server.cache_is_stale
    assert not server.features_are_stale


def out_of_service(server):
    """Assert that the server does not answer, because its weights are unknown."""
    assert server.paused == "abort"


def test_a_push_is_staged_then_loaded_during_a_pause_then_verified(start):
    server = start()
    push = publisher(server)
    push.publish(weights(1), version=1)
    serves(server, "1", 1)
    assert server.paths()[-len(PUSH) :] == PUSH
    push.publish(weights(2), version=2)
    serves(server, "2", 2)
    assert server.paths().count("/init_weight_transfer_engine") == 1
    assert set(push.timings) == {"transfer_s", "paused_s"}


def test_a_push_sends_the_secret_that_the_server_requires(start):
    server = start()
    server.secret = "only-the-starter-knows-it"
    with pytest.raises(PublishError, match=r"401.*needs the server's secret"):
        publisher(server).publish(weights(1), version=1)
    assert server.calls == []
    port = int(server.url.rsplit(":", 1)[1])
    store_secret(port, server.secret)
    try:
        publisher(server).publish(weights(1), version=1)
    finally:
        remove_secret(port, server.secret)
    serves(server, "1", 1)


def test_a_push_to_several_servers_reaches_each(start):
    servers = [start(), start()]
    publisher(*servers).publish(weights(1), version=7)
    for server in servers:
        serves(server, "7", 1)


def test_the_disk_backend_keeps_the_folder_of_the_served_version(start, tmp_path):
    server = start(backend="disk")
    push = publisher(server, directory=tmp_path / "shared")
    for version in (1, 2, 3):
        push.publish(weights(version), version=version)
        serves(server, str(version), version)
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == ["version_2", "version_3"]
    assert "/init_weight_transfer_engine" not in server.paths()


@pytest.mark.parametrize("backend", ["gloo", "disk"])
def test_weights_that_are_gathered_meanwhile_are_read_for_their_fingerprints_and_for_the_push(start, tmp_path, backend):
    server = start(backend=backend)
    push = publisher(server, **({"directory": tmp_path / "shared"} if backend == "disk" else {}))
    prefixed = Gathered({f"base_model.model.{name}": tensor for name, tensor in sorted(weights(1).items(), reverse=True)})
    push.publish_stream(prefixed, version=1)
    serves(server, "1", 1)
    assert prefixed.gathered == list(prefixed.weights) * 2
    push.publish_stream(prefixed, version=2)  # unchanged: only their fingerprints are taken
    serves(server, "2", 1)
    assert prefixed.gathered == list(prefixed.weights) * 3
    push.publish_stream(Gathered(weights(2)), version=3)
    serves(server, "3", 2)


def test_gathered_weights_that_do_not_fit_are_refused_before_they_are_gathered(start):
    server, source = start(), Gathered({**weights(1), "model.other.weight": torch.zeros(2)})
    with pytest.raises(PublishError, match=r"the server has no weights model\.other\.weight"):
        publisher(server).publish_stream(source, version=1)
    assert source.gathered == []


def test_the_disk_backend_needs_a_directory(start):
    with pytest.raises(PublishError, match=r"backend of .* is disk; pass directory="):
        publisher(start(backend="disk"))


def test_the_parts_of_the_specification_work_together(start):
    server = start()
    client = SimpleNamespace(server_url=server.url, _session=SimpleNamespace(headers={"X-Key": "7"}))
    with pytest.raises(RuntimeError, match="no connection for weights"):
        VllmTensorCommunicator(client)
    control = VllmControlPlane(client)
    with pytest.raises(RuntimeError, match="no connection for weights"):
        VllmTensorCommunicator(client)
    control.prepare()
    communicator = VllmTensorCommunicator(client)
    assert communicator.rank == 0
    inner = BroadcastPolicyPublisher(control, communicator, src_rank=0)
    prefixed = {f"base_model.model.{name}": tensor for name, tensor in weights(1).items()}
    VllmPublisherAdapter(inner).publish(prefixed, version=3)
    serves(server, "3", 1)
    with pytest.raises(RuntimeError, match="src \\(1\\) must be 0"):
        communicator.broadcast(torch.zeros(1), src=1)
    assert {headers.get("x-key") for headers in server.headers} == {"7"}


def test_weights_are_sent_in_the_servers_dtype(start):
    server = start(dtype="bfloat16", first=weights(0, torch.bfloat16))
    publisher(server).publish(weights(1), version=1)
    assert same(server.served, weights(1, torch.bfloat16))


def test_a_tied_head_is_not_sent_and_one_that_differs_is_refused(start):
    server = start(tied=True)
    tied = {**weights(1), "lm_head.weight": weights(1)["model.embed_tokens.weight"]}
    push = publisher(server)
    push.publish(tied, version=1)
    serves(server, "1", 1)
    with pytest.raises(PublishError, match="tie_word_embeddings"):
        push.publish({**weights(2), "lm_head.weight": torch.ones(12, 4)}, version=2)
    serves(server, "1", 1)


NORM, QUERY, KEY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
UNFIT = {
    "wrong shape": ({NORM: torch.ones(5)}, "has shape \\(5,\\), the server's \\(4,\\)"),
    "missing": ({NORM: None}, "model.norm.weight.* missing in the push"),
    "unknown": (
        {"model.layers.2.mlp.up_proj.weight": torch.ones(1)},
        r"no weights .*layers.2.*model .*trained",
    ),
    "quantised": ({NORM: torch.ones(4, dtype=torch.int8)}, "is torch.int8, the server.s is float32"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_weights_that_do_not_match_are_refused_before_the_server_is_contacted(start, case):
    changed, message = UNFIT[case]
    server = start()
    push = publisher(server)
    unfit = {name: tensor for name, tensor in {**weights(1), **changed}.items() if tensor is not None}
    with pytest.raises(PublishError, match=message):
        push.publish(unfit, version=1)
    assert "/start_weight_update" not in server.paths()
    serves(server, "default", 0)


def test_nothing_to_publish_is_an_error(start):
    with pytest.raises(PublishError, match="no weight to publish"):
        publisher(start()).publish({}, version=1)


def test_frozen_weights_keep_the_servers_values(start):
    """Fused layers are loaded as a whole: if only a part is pushed, the server adds its own weights
    for the rest."""
    server = start()
    push = publisher(server, partial=True)
    for version in (1, 2):
        push.publish({QUERY: weights(version)[QUERY]}, version=version)
        assert same(server.served, {**weights(0), QUERY: weights(version)[QUERY]})
    push.publish({QUERY: weights(3)[QUERY], KEY: weights(3)[KEY]}, version=3)
    with pytest.raises(PublishError, match=r"k_proj.weight' of earlier pushes is missing"):
        push.publish({QUERY: weights(4)[QUERY]}, version=4)
    assert same(server.served, {**weights(0), QUERY: weights(3)[QUERY], KEY: weights(3)[KEY]})


def test_unchanged_weights_are_pushed_on_request(start):
    server = start()
    push = publisher(server, allow_unchanged=True)
    push.publish(weights(2), version=3)
    push.publish(weights(2), version=4)
    assert server.paths().count("/update_weights") == 2
    serves(server, "4", 2)


def test_updates_that_are_all_lost_in_the_servers_dtype_are_an_error(start):
    push = publisher(start(dtype="bfloat16", first=weights(0, torch.bfloat16)))
    push.publish(weights(1), version=0)
    almost = {name: tensor * (1 + 1e-6) for name, tensor in weights(1).items()}
    for version in range(1, MOST_IN_A_ROW):
        push.publish(almost, version=version)
    with pytest.raises(PublishError, match=r"in the server's bfloat16.*learning rate"):
        push.publish(almost, version=MOST_IN_A_ROW)


def test_a_server_whose_values_differ_from_the_sent_ones_is_taken_out_of_service(start):
    server = start()
    push = publisher(server)
    server.loads_nothing = True
    with pytest.raises(PublishError, match=r"5 are served with other values.*Restart"):
        push.publish(weights(1), version=1)
    out_of_service(server)


def test_a_trainer_that_dies_during_a_push_leaves_the_old_weights_served(start):
    server = start()
    dying = VllmControlPlane(server.url, timeout_s=5.0)
    dying.prepare()
    link = dying.links[0]
    entries = [(name, tensor) for name, tensor in sorted(weights(1).items())]
    link.begin({"names": [n for n, _ in entries], "dtype_names": ["float32"] * 5, "shapes": [list(t.shape) for _, t in entries]})
    link.send(entries[0][1])
    update = link._update
    link.close()  # as the end of its process would
    with pytest.raises(LudicError, match="500"):
        update.result(30)
    serves(server, "default", 0)
    publisher(server).publish(weights(2), version=2)
    serves(server, "2", 2)


def test_the_next_trainer_discards_what_a_dead_one_staged(start):
    server = start(backend="disk")
    dying = VllmControlPlane(server.url, by_folder=True)
    dying.prepare()
    dying.announce_folder(server.folder)
    dying.wait_staged()
    assert server.receiver.open
    push = publisher(server, directory=server.folder.parent / "shared")
    assert not server.receiver.open
    push.publish(weights(1), version=1)
    serves(server, "1", 1)


def test_the_next_trainer_ends_a_push_whose_trainer_died_while_it_dropped_it(start):
    server = start(backend="disk")
    dying = VllmControlPlane(server.url, by_folder=True)
    dying.prepare()
    dying.announce_folder(server.folder)
    dying.wait_staged()
    dying.links[0].endpoints.rpc("ludic_discard", timeout_s=30)  # and dies before it ends the update
    assert server.active
    push = publisher(server, directory=server.folder.parent / "shared")
    push.publish(weights(1), version=1)
    serves(server, "1", 1)


def test_a_slow_server_is_named_and_the_old_version_stays(start, monkeypatch):
    monkeypatch.setattr(server_link, "ANSWER_MARGIN_S", 0.2)
    servers = [start(), start()]
    push = publisher(*servers, timeout_s=1.0)
    servers[1].faults["/update_weights"] = lambda _: servers[1].closing.wait()
    with pytest.raises(TimeoutError, match=f"(?s)no server loaded any of it.*{servers[1].url}"):
        push.publish(weights(1), version=1)
    for server in servers:
        assert same(server.served, weights(0))
        assert (server.version, server.paused) == ("default", None)


def test_a_restarted_server_is_reconnected_and_gets_the_next_version(start, caplog):
    server = start()
    push = publisher(server)
    push.publish(weights(1), version=1)
    server.restart()
    serves(server, "default", 0)
    push.publish(weights(2), version=2)
    serves(server, "2", 2)
    assert "was restarted" in caplog.text


def test_a_stopped_server_is_named_and_the_others_keep_the_old_version(start, tmp_path):
    server = start()
    with StubWeightServer(tmp_path / "gone") as gone:
        push = publisher(server, gone)
    with pytest.raises(PublishError, match=f"{gone.url}.*cannot be reached.*server running"):
        push.publish(weights(1), version=1)
    serves(server, "default", 0)


def test_if_one_server_cannot_take_the_push_none_loads_it(start):
    servers = [start(), start()]
    push = publisher(*servers)
    servers[1].faults["/update_weights"] = refuse("CUDA out of memory")
    with pytest.raises(PublishError, match="CUDA out of memory"):
        push.publish(weights(1), version=1)
    for server in servers:
        serves(server, "default", 0)
    servers[1].faults.clear()
    push.publish(weights(1), version=1)
    for server in servers:
        serves(server, "1", 1)


def test_a_server_that_fails_while_loading_is_out_of_service_until_restarted(start):
    servers = [start(), start()]
    push = publisher(*servers)
    servers[1].faults["/finish_weight_update"] = refuse("")
    with pytest.raises(PublishError, match=f"version 1 is served by {servers[0].url}; taken out of service: {servers[1].url}"):
        push.publish(weights(1), version=1)
    serves(servers[0], "1", 1)
    out_of_service(servers[1])
    with pytest.raises(PublishError, match=f"{servers[1].url} is out of service.*restart it"):
        push.publish(weights(2), version=2)
    serves(servers[0], "1", 1)
    servers[1].faults.clear()
    servers[1].restart()
    push.publish(weights(2), version=2)
    for server in servers:
        serves(server, "2", 2)


def test_continuing_without_a_lost_server_is_a_setting(start, caplog):
    servers = [start(), start()]
    push = publisher(*servers, tolerate_lost_servers=True)
    servers[1].faults["/finish_weight_update"] = refuse("")
    push.publish(weights(1), version=1)
    push.publish(weights(2), version=2)
    serves(servers[0], "2", 2)
    out_of_service(servers[1])
    assert servers[1].url in caplog.text
    servers[0].faults["/update_weights"] = refuse("")
    with pytest.raises(PublishError, match=r"not published|abandoned"):
        push.publish(weights(3), version=3)


def test_a_cache_that_cannot_be_reset_takes_the_server_out_of_service(start):
    server = start()
    push = publisher(server)
    server.on_reset_prefix_cache = lambda *_: {"success": False}
    with pytest.raises(PublishError, match="could not reset its prefix cache"):
        push.publish(weights(1), version=1)
    out_of_service(server)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("step", "served"),
    [("start_update", 1), ("pause", 2), ("finish_update", 2), ("reset_prefix_cache", 2), ("resume", 2)],
)
def test_ctrl_c_leaves_the_old_or_the_new_version_on_all_servers(start, step, served, count):
    """Between pause and resume the interrupt is delayed, because a server resumed too early would
    use keys and values of the old weights."""
    servers = [start() for _ in range(count)]
    push = publisher(*servers)
    push.publish(weights(1), version=1)
    endpoints = push.control.links[-1].endpoints
    call, calls = getattr(endpoints, step), []

    def interrupted(*args, **kwargs):
        call(*args, **kwargs)
        calls.append(step)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    setattr(endpoints, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        push.publish(weights(2), version=2)
    for server in servers:
        serves(server, str(served), served)
    push.publish(weights(3), version=3)
    for server in servers:
        serves(server, "3", 3)


@pytest.mark.parametrize("begun", [False, True])
def test_ctrl_c_while_the_thread_of_a_push_starts_waits_for_it_or_has_it_never_begin(monkeypatch, begun):
    started, done, original = threading.Event(), [], threading.Thread.start

    def call():
        started.set()
        time.sleep(0.2)
        done.append(True)

    def interrupted(thread):
        if begun:
            original(thread)
            assert started.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        complete_before_interrupt(call, what="it")
    assert done == [True] * begun


def test_a_second_ctrl_c_is_raised_immediately(start):
    server = start()
    push = publisher(server)
    link = push.control.links[0]
    commit, held = link.commit, threading.Event()

    def slow(*args):
        os.kill(os.getpid(), signal.SIGINT)
        assert held.wait(60)
        commit(*args)

    class Again(logging.Handler):
        """Sends a second SIGINT when the first one is logged."""

        def emit(self, record):
            os.kill(os.getpid(), signal.SIGINT)

    link.commit = slow
    handler = Again()
    logging.getLogger("ludic.distributed.push.target").addHandler(handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            push.publish(weights(1), version=1)
    finally:
        logging.getLogger("ludic.distributed.push.target").removeHandler(handler)
    assert server.paused == "keep"
    held.set()
    for thread in threading.enumerate():
        if thread.name.startswith("ludic-servers"):
            thread.join(60)  # the started steps are completed
    serves(server, "1", 1)


def test_the_cache_of_an_abandoned_push_is_reset_before_the_server_resumes(start):
    """Another trainer abandoned a push: the server is paused, and its cache belongs to earlier
    weights."""
    servers = [start(), start()]
    push = publisher(*servers)
    servers[0].paused, servers[0].cache_is_stale = "abort", True
    servers[1].faults["/pause"] = refuse("a fault")
    with pytest.raises(PublishError, match=r"no server loaded any.*a fault"):
        push.publish(weights(1), version=1)
    for server in servers:
        serves(server, "default", 0)


def test_if_the_cache_cannot_be_reset_the_server_stays_paused_and_the_error_says_so(start):
    servers = [start(), start()]
    push = publisher(*servers)
    servers[0].on_reset_prefix_cache = lambda *_: {"success": False}
    servers[1].faults["/pause"] = refuse("a fault")
    message = f"a fault.*may stay paused.*{servers[0].url}.*could not reset its prefix cache"
    with pytest.raises(PublishError, match=message):
        push.publish(weights(1), version=1)
    assert servers[0].paused == "keep"
    serves(servers[1], "default", 0)
    del servers[0].on_reset_prefix_cache
    servers[1].faults.clear()
    push.publish(weights(2), version=2)
    for server in servers:
        serves(server, "2", 2)


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    with StubWeightServer(folder / "a") as one, StubWeightServer(folder / "b") as two:
        yield one, two


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(failing=st.sampled_from(PUSH), after=st.booleans(), who=st.integers(0, 1))
def test_after_any_fault_a_server_serves_the_old_version_the_new_one_or_nothing(two_servers, failing, after, who):
    """`after`: the server executes the step, and its response is lost."""
    for server in two_servers:
        server.faults.clear()
        server.restart()
    push = publisher(*two_servers)
    push.publish(weights(1), version=1)
    unlucky = two_servers[who]

    def fault(body):
        unlucky.faults.clear()
        if after:
            path = failing.partition(":")[0]
            getattr(unlucky, "on_" + path.strip("/"))({"mode": ["keep"], "reset_running_requests": ["true"]}, body)
        raise Refused(500, "a fault")

    unlucky.faults[failing] = fault
    with pytest.raises(PublishError, match="a fault") as raised:
        push.publish(weights(2), version=2)
    assert unlucky.url in str(raised.value)
    for server in two_servers:
        if server.paused is None:
            serves(server, server.version, int(server.version))
        else:
            assert server is unlucky
            out_of_service(server)
            assert "out of service" in str(raised.value)
    if out := [server for server in two_servers if server.paused is not None]:
        assert out == [unlucky]
        unlucky.restart()
    push.publish(weights(3), version=3)
    for server in two_servers:
        serves(server, "3", 3)


def test_the_error_without_the_worker_extension_says_how_to_start_the_server(start):
    server = start()
    server.without_extension = True
    with pytest.raises(PublishError, match=r"no attribute 'ludic_state'.*worker-extension-cls"):
        publisher(server)


def test_the_error_without_control_endpoints_says_how_to_start_the_server(start):
    server = start()
    server.faults["/collective_rpc:ludic_state"] = refuse("Not Found", status=404)
    with pytest.raises(PublishError, match="VLLM_SERVER_DEV_MODE=1"):
        publisher(server)


def test_servers_of_different_models_are_refused(start):
    servers = [start(), start(first={**weights(0), NORM: torch.ones(6)})]
    with pytest.raises(PublishError, match="different shapes"):
        publisher(*servers)


def test_with_rank0_only_no_server_is_contacted_before_the_first_push(start, monkeypatch):
    push = create_vllm_publisher(object(), rank0_only=True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    push.publish(weights(1), version=1)
    server = start()
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    create_vllm_publisher(server.url, rank0_only=True).publish(weights(1), version=1)
    serves(server, "1", 1)


def test_the_publisher_uses_the_servers_of_a_client():
    assert as_push_target("http://a").all_urls() == ["http://a"]
    assert as_push_target(SimpleNamespace(server_url="http://a")).all_urls() == ["http://a"]
    both = SimpleNamespace(server_url="http://a", server_urls=["http://a", "http://b"])
    assert as_push_target(both).all_urls() == ["http://a", "http://b"]
    assert as_push_target([SimpleNamespace(server_url="http://a"), "http://b"]).all_urls() == ["http://a", "http://b"]
    without_constructor = VLLMChatClient.__new__(VLLMChatClient)
    without_constructor.server_url = "http://a"
    assert as_push_target(without_constructor).all_urls() == ["http://a"]


def test_two_trainers_can_take_turns(start):
    """A server has one connection. A trainer that finds the other's reopens its own."""
    server = start()
    one, two = publisher(server), publisher(server)
    for version, push in enumerate((one, two, one, two), start=1):
        push.publish(weights(version), version=version)
        serves(server, str(version), version)


def test_a_client_learns_the_served_version_and_which_servers_to_avoid(start):
    calls = []
    servers = [start(), start()]
    client = SimpleNamespace(server_urls=[server.url for server in servers])
    client.weights_changed = lambda version, lost: calls.append((version, lost))
    push = create_vllm_publisher(client, tolerate_lost_servers=True, timeout_s=5.0)
    push.publish(weights(1), version=1)
    servers[1].faults["/finish_weight_update"] = refuse("")
    push.publish(weights(2), version=2)
    assert calls == [("1", []), ("2", [servers[1].url])]


def test_a_server_that_answers_neither_pause_nor_resume_is_named_and_gets_no_requests(start):
    """Whether it is paused is unknown: both requests may still arrive, in any order."""
    calls = []
    servers = [start(), start()]
    client = SimpleNamespace(server_urls=[server.url for server in servers])
    client.weights_changed = lambda version, lost: calls.append((version, lost))
    push = create_vllm_publisher(client, timeout_s=5.0)
    for path in ("/pause", "/resume"):
        servers[1].faults[path] = refuse("asleep")
    with pytest.raises(PublishError, match=f"no server loaded any.*paused.*{servers[1].url}/resume.*asleep"):
        push.publish(weights(1), version=1)
    assert calls == [(None, [servers[1].url])]
    serves(servers[0], "default", 0)
    servers[1].faults.clear()
    servers[1].paused = "keep"
    push.publish(weights(2), version=2)
    assert calls[1:] == [("2", [])]
    for server in servers:
        serves(server, "2", 2)


def test_a_closed_publisher_reconnects_for_the_next_push(start):
    server = start()
    push = publisher(server)
    push.publish(weights(1), version=1)
    push.close()
    with pytest.raises(PublishError, match="no connection for weights"):
        VllmTensorCommunicator(push.control)
    serves(server, "1", 1)
    push.publish(weights(2), version=2)
    serves(server, "2", 2)


def test_a_push_without_a_version_gets_one(start):
    server = start()
    publisher(server).publish(weights(1))
    assert server.version.startswith("vllm-")


def test_pushes_from_a_thread_beside_the_event_loop_are_complete(start):
    server = start()
    push = publisher(server)
    thread = threading.Thread(target=push.publish, args=(weights(1), 1))
    thread.start()
    thread.join(30)
    serves(server, "1", 1)
