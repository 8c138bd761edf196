"""Engines that load a checkpoint: all serve the new version or all the one before, whatever fails,
and the error says who serves what."""

import asyncio
import contextlib
import json
import threading

import pytest
from free_ports import free_port
from jumping_loop import play_jumping
from safetensors.torch import load_file, save_file
from stub_sglang import StubSGLang
from stub_weight_server import refuse, same, weights

from ludic.distributed.engines import (
    SGLangEngine,
    VLLMEngine,
    sync_returned_engines,
    sync_weights_to_engines,
    update_sglang_weights_from_disk,
    update_vllm_weights_from_disk,
)
from ludic.distributed.push import engine_sessions
from ludic.distributed.push.manifest import VersionFolders
from ludic.errors import ConfigError, ConfigTypeError, PublishError, PublishTimeoutError

DEADLINE_S = 60.0
"""For an event that comes within milliseconds on an idle machine."""


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch):
    monkeypatch.setattr(engine_sessions, "BACKOFF_S", 0.0)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(weights(0), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"dtype": "float32", "tie_word_embeddings": False}))
    return folder


@pytest.fixture
def sglang(model):
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(StubSGLang(model))


@pytest.fixture
def checkpoint(model, tmp_path):
    """`checkpoint(n)` is a folder `version_n` with weights(n)."""
    folders = VersionFolders(tmp_path / "checkpoints", model=model, keep=9)
    return lambda number: str(folders.write(weights(number), number))


class CustomEngine:
    """An engine in this process. `fault` is called with each path before it is loaded."""

    def __init__(self):
        self.served, self.version, self.timeout, self.fault = weights(0), "default", DEADLINE_S, None

    async def update_weights_from_checkpoint(self, checkpoint_path):
        answer = await self.fault(checkpoint_path) if self.fault else None
        if answer is None:
            self._load(checkpoint_path)
        return {"success": True} if answer is None else answer

    def _load(self, checkpoint_path):
        self.served, self.version = load_file(f"{checkpoint_path}/model.safetensors"), checkpoint_path.rpartition("/")[2]


class Fleet:
    """A vLLM stub, an SGLang stub and an engine of the user, one of which will fail."""

    def __init__(self, vllm, sglang):
        self.vllm, self.sglang, self.custom = vllm, sglang, CustomEngine()
        self.engines = [VLLMEngine(vllm.url, DEADLINE_S), SGLangEngine(sglang.url, DEADLINE_S), self.custom]
        self.held = threading.Event()
        """Set to let calls go on that hang."""

    def states(self):
        """For each engine: weights, version, whether it answers requests."""
        return [
            (self.vllm.served, self.vllm.version, self.vllm.paused is None),
            (self.sglang.served, self.sglang.version, not self.sglang.paused),
            (self.custom.served, self.custom.version, True),
        ]

    def check(self, number, but=None):
        """All engines but one serve version `number`."""
        for index, (served, version, answers) in enumerate(self.states()):
            if index != but:
                assert same(served, weights(number)), index
                assert (version, answers) == (f"version_{number}", True), index


@pytest.fixture
def fleet(start, sglang):
    fleet = Fleet(start(), sglang())
    yield fleet
    fleet.held.set()


VLLM, SGLANG, CUSTOM = range(3)
BULK = {VLLM: "/update_weights", SGLANG: "/update_weights_from_disk"}
"""The call that reads the folder."""


def server_of(fleet, index):
    return (fleet.vllm, fleet.sglang)[index]


def refused(fleet, index):
    """Nothing listens any more."""
    if index == CUSTOM:
        fleet.custom.fault = raising(ConnectionRefusedError("nothing listens there"))
        return lambda: setattr(fleet.custom, "fault", None)
    engine, url = fleet.engines[index], fleet.engines[index].base_url
    engine.base_url = f"http://127.0.0.1:{free_port()}"
    return lambda: setattr(engine, "base_url", url)


def raising(error):
    async def fault(_):
        raise error

    return fault


def answering(answer):
    async def fault(_):
        return answer

    return fault


def with_fault(fleet, index, path, fault):
    faults = server_of(fleet, index).faults
    faults[path] = fault
    return lambda: faults.pop(path, None)


def custom_fault(fleet, fault):
    fleet.custom.fault = fault
    return lambda: setattr(fleet.custom, "fault", None)


def answers_500(fleet, index):
    if index == CUSTOM:
        return custom_fault(fleet, raising(RuntimeError("the engine broke")))
    fault = refuse("the engine broke") if index == VLLM else lambda _: (500, {"detail": "the engine broke"})
    return with_fault(fleet, index, BULK[index], fault)


def hangs(fleet, index):
    fleet.engines[index].timeout = 0.3
    if index == CUSTOM:
        heal = custom_fault(fleet, answering_after(asyncio.Event()))
    else:
        heal = with_fault(fleet, index, BULK[index], lambda _: fleet.held.wait(DEADLINE_S) and None)

    def end():
        fleet.held.set()
        heal()
        fleet.engines[index].timeout = DEADLINE_S

    return end


def answering_after(event):
    async def fault(_):
        await event.wait()

    return fault


def success_is_false(fleet, index):
    if index == CUSTOM:
        return custom_fault(fleet, answering({"success": False, "message": "no such folder"}))
    if index == VLLM:
        return with_fault(fleet, VLLM, "/update_weights", refuse("no such folder"))
    return with_fault(fleet, SGLANG, BULK[SGLANG], lambda _: (200, {"success": False, "message": "no such folder"}))


def dies_after_staging(fleet, index):
    """Every call after the one that read the folder is cut."""
    if index == CUSTOM:

        async def load_and_die(path):
            fleet.custom._load(path)
            raise ConnectionResetError("gone")

        return custom_fault(fleet, load_and_die)
    server = server_of(fleet, index)
    later = {
        VLLM: ["/pause", "/finish_weight_update", "/resume", "/collective_rpc:ludic_state", "/collective_rpc:ludic_discard"],
        SGLANG: ["/continue_generation", "/generate", "/pause_generation", "/update_weights_from_disk"],
    }[index]
    loaded = threading.Event()

    def cut(_):
        if loaded.is_set():
            raise ConnectionAbortedError

    def load_then_die(body):
        if loaded.is_set():
            raise ConnectionAbortedError
        loaded.set()

    server.faults |= {**dict.fromkeys(later, cut), BULK[index]: load_then_die}

    def come_back():
        server.faults.clear()
        server.restart()
        if index == VLLM:
            server.paused = None

    return come_back


def restarts(fleet, index):
    """It has its first weights again just before it would serve the new ones."""
    if index == CUSTOM:

        async def load_and_restart(path):
            fleet.custom.served, fleet.custom.version = weights(0), "default"
            fleet.custom.fault = None
            raise ConnectionResetError("restarted")

        return custom_fault(fleet, load_and_restart)
    server = server_of(fleet, index)
    path = {VLLM: "/pause", SGLANG: "/continue_generation"}[index]

    def restart(_):
        del server.faults[path]
        server.restart()

    return with_fault(fleet, index, path, restart)


def garbage(fleet, index):
    if index == CUSTOM:
        return custom_fault(fleet, answering("fine"))
    if index == VLLM:
        return with_fault(fleet, VLLM, "/collective_rpc:ludic_fingerprint", lambda _: "<html>")
    return with_fault(fleet, SGLANG, BULK[SGLANG], lambda _: (200, "<html>"))


FAULTS = [refused, answers_500, hangs, success_is_false, dies_after_staging, restarts, garbage]


def check_answer_is_true(fleet, index, answer):
    """An answer never names a version that the engine does not serve."""
    served, version, answers_requests = fleet.states()[index]
    if answer["version"] is not None:
        assert answer["version"] == version
        assert answers_requests
        number = 0 if version == "default" else int(version.rpartition("_")[2])
        assert same(served, weights(number))
    elif index != CUSTOM:
        # either it cannot be reached, or it answers no requests
        assert not answers_requests or "cannot be reached" in answer["error"] or "500" in answer["error"]


@pytest.mark.parametrize("index", [VLLM, SGLANG, CUSTOM], ids=["vllm", "sglang", "custom"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_if_one_engine_fails_all_serve_the_version_before_and_the_next_sync_heals(fleet, checkpoint, fault, index):
    await sync_weights_to_engines(fleet.engines, checkpoint(1))
    fleet.check(1)
    heal = fault(fleet, index)
    restarted_but_fine = fault is restarts and index == CUSTOM  # one of the user's that restarts is asked again
    if restarted_but_fine:
        answers = await sync_weights_to_engines(fleet.engines, checkpoint(2))
        assert [answer["success"] for answer in answers] == [True] * 3
        fleet.check(2)
        return
    with pytest.raises(PublishError, match="of 3 engines did not load") as caught:
        await sync_weights_to_engines(fleet.engines, checkpoint(2))
    answers = caught.value.answers
    assert len(answers) == 3
    assert not any(answer["success"] for answer in answers)
    name = fleet.engines[index].base_url if index != CUSTOM else "CustomEngine"
    assert name in str(caught.value)
    fleet.check(1, but=index)
    assert [answer["version"] for i, answer in enumerate(answers) if i != index] == ["version_1"] * 2
    check_answer_is_true(fleet, index, answers[index])
    assert all(version != "version_2" for version in fleet.sglang.answered)
    heal()
    answers = await sync_weights_to_engines(fleet.engines, checkpoint(3))
    assert [answer["version"] for answer in answers] == ["version_3"] * 3
    fleet.check(3)


@pytest.mark.parametrize("index", [VLLM, SGLANG, CUSTOM], ids=["vllm", "sglang", "custom"])
@pytest.mark.parametrize(
    "fault",
    [answers_500, *(pytest.param(fault, marks=pytest.mark.integration) for fault in (refused, hangs, success_is_false, garbage))],
    ids=lambda fault: fault.__name__,
)
async def test_where_some_may_fail_the_answer_says_which_and_the_engine_gets_the_version_when_it_returns(
    fleet, checkpoint, fault, index
):
    await sync_weights_to_engines(fleet.engines, checkpoint(1))
    heal = fault(fleet, index)
    answers = await sync_weights_to_engines(fleet.engines, checkpoint(2), policy=2)
    assert [answer["success"] for answer in answers] == [i != index for i in range(3)]
    fleet.check(2, but=index)
    check_answer_is_true(fleet, index, answers[index])
    heal()
    returned = await sync_returned_engines(fleet.engines)
    assert [answer is not None for answer in returned] == [i == index for i in range(3)]
    fleet.check(2)
    assert await sync_returned_engines(fleet.engines) == [None] * 3


async def test_a_restarted_server_gets_the_version_of_the_others_before_it_is_asked(fleet, checkpoint):
    assert await sync_returned_engines(fleet.engines) == [None] * 3  # nothing was synced yet
    await sync_weights_to_engines(fleet.engines, checkpoint(1))
    fleet.vllm.restart()
    fleet.sglang.restart()
    answers = await sync_returned_engines(fleet.engines)
    assert [answer and answer["version"] for answer in answers] == ["version_1", "version_1", None]
    fleet.check(1)
    fleet.sglang.restart()
    fleet.sglang.fails_on = "version_1"
    _, failed, _ = await sync_returned_engines(fleet.engines)
    assert not failed["success"]


async def test_asking_a_server_that_hangs_can_be_cancelled(fleet, checkpoint):
    await sync_weights_to_engines(fleet.engines, checkpoint(1))
    inside = threading.Event()

    def wait(_):
        inside.set()
        fleet.held.wait(DEADLINE_S)

    fleet.sglang.faults["/model_info"] = wait
    before = set(threading.enumerate())
    task = asyncio.ensure_future(sync_returned_engines([fleet.engines[SGLANG]]))
    assert await asyncio.to_thread(inside.wait, DEADLINE_S)
    asking = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("ludic-engines")]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [thread.is_alive() for thread in asking] == [True]  # the loop has not waited for it
    fleet.held.set()
    await asyncio.to_thread(asking[0].join, DEADLINE_S)


async def test_engines_load_at_the_same_time(sglang, start, checkpoint):
    """All eight must be inside their load at once, or none gets out."""
    inside = threading.Barrier(8)

    def wait(_):
        inside.wait(DEADLINE_S)

    servers = [sglang() for _ in range(4)]
    vllm = [start() for _ in range(4)]
    for server in servers:
        server.faults["/update_weights_from_disk"] = wait
    for server in vllm:
        server.faults["/update_weights"] = wait
    engines = [
        kind(server.url)
        for pair in zip(servers, vllm, strict=True)
        for kind, server in zip((SGLangEngine, VLLMEngine), pair, strict=True)
    ]
    answers = await sync_weights_to_engines(engines, checkpoint(1))
    assert [answer["version"] for answer in answers] == ["version_1"] * 8
    marks = {answer["fingerprint"] for answer in answers[1::2]}
    assert len(marks) == 1
    assert marks != {None}


async def test_no_server_answers_with_the_new_weights_before_all_have_them(fleet, checkpoint):
    asked = []

    def look(_):
        asked.append([fleet.sglang.paused, fleet.vllm.version])

    fleet.sglang.faults["/continue_generation"] = look
    fleet.vllm.faults["/finish_weight_update"] = look
    await sync_weights_to_engines(fleet.engines, checkpoint(1))
    assert asked == [[True, "default"], [True, "version_1"]]


async def test_a_tensor_that_changed_on_its_way_is_found(start, checkpoint):
    server = start()
    engines = [VLLMEngine(server.url)]
    await sync_weights_to_engines(engines, checkpoint(1))
    for name in server.served:

        def change(_, name=name):
            server.faults.clear()
            server.served[name] = server.served[name] + 1e-7

        server.faults["/reset_prefix_cache"] = change
        with pytest.raises(PublishError, match=f"1 .*other values, first '{name}'"):
            await sync_weights_to_engines(engines, checkpoint(2))
        assert same(server.served, weights(1))


async def test_without_an_earlier_sync_servers_go_back_to_their_own_model(fleet, checkpoint):
    heal = custom_fault(fleet, answering({"success": False, "error": "it is full"}))
    with pytest.raises(PublishError, match="it is full") as caught:
        await sync_weights_to_engines(fleet.engines, checkpoint(1))
    vllm, sglang, custom = caught.value.answers
    assert (vllm["version"], sglang["version"], custom["version"]) == ("default", "default", None)
    assert same(fleet.vllm.served, weights(0))
    assert same(fleet.sglang.served, weights(0))
    assert not fleet.sglang.paused
    heal()
    fleet.vllm.faults["/finish_weight_update"] = lambda _: fleet.vllm.faults.clear() or refuse("out of memory")(_)
    with pytest.raises(PublishError, match=r"serve version default.*CustomEngine serve version version_1"):
        await sync_weights_to_engines(fleet.engines, checkpoint(1))
    assert same(fleet.vllm.served, weights(0))


async def test_an_engine_that_refuses_is_asked_again_and_one_that_hangs_is_not(fleet, checkpoint):
    fleet.sglang.faults["/update_weights_from_disk"] = lambda _: fleet.sglang.faults.clear() or (500, {"detail": "busy"})
    answers = await sync_weights_to_engines(fleet.engines, checkpoint(1))
    assert all(answer["success"] for answer in answers)
    assert fleet.sglang.paths().count("/update_weights_from_disk") == 2
    heal = hangs(fleet, SGLANG)
    with pytest.raises(PublishError):
        await sync_weights_to_engines(fleet.engines, checkpoint(2), retries=5)
    assert fleet.sglang.paths().count("/update_weights_from_disk") == 3
    assert fleet.sglang.paused  # it may still load version 2
    heal()


@pytest.mark.parametrize("ignores_cancellation", [False, True])
def test_a_hang_ends_within_the_timeout_and_a_second_on_the_loops_clock(checkpoint, ignores_cancellation):
    engines = [CustomEngine() for _ in range(3)]
    for number, engine in enumerate(engines):
        engine.name, engine.timeout = f"engine {number}", 7.0

    async def hang():
        await sync_weights_to_engines(engines, checkpoint(1))
        held = asyncio.Event()

        async def wait(_):
            while not held.is_set():
                with contextlib.suppress(asyncio.CancelledError) if ignores_cancellation else contextlib.nullcontext():
                    await held.wait()

        engines[1].fault = wait
        begin = asyncio.get_running_loop().time()
        with pytest.raises(PublishTimeoutError, match=r"engine 1 .*no answer within 7 s") as caught:
            await sync_weights_to_engines(engines, checkpoint(2), retries=5)
        taken_s = asyncio.get_running_loop().time() - begin
        left_alone = asyncio.all_tasks() - {asyncio.current_task()}
        held.set()
        await asyncio.gather(*left_alone)
        return taken_s, len(left_alone), caught.value.answers

    taken_s, left_alone, answers = play_jumping(hang())
    assert left_alone == ignores_cancellation
    assert 7 <= taken_s <= 8
    assert [answer["version"] for answer in answers] == ["version_1", None, "version_1"]


async def test_a_cancelled_sync_ends_with_all_engines_on_one_version(fleet, checkpoint):
    inside = threading.Event()

    def wait(_):
        inside.set()
        fleet.held.wait(DEADLINE_S)

    fleet.sglang.faults["/update_weights_from_disk"] = wait
    task = asyncio.ensure_future(sync_weights_to_engines(fleet.engines, checkpoint(1)))
    assert await asyncio.to_thread(inside.wait, DEADLINE_S)
    task.cancel()
    await asyncio.sleep(0)
    fleet.held.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    fleet.check(1)


async def test_an_engine_of_the_user_may_say_its_version_and_answer_without_a_word_about_success(checkpoint):
    class Plain:
        __slots__ = ()

        def update_weights_from_checkpoint(self, checkpoint_path):
            return {"version": "mine", "fingerprint": "f00", "note": checkpoint_path[-9:]}

    (answer,) = await sync_weights_to_engines([Plain()], checkpoint(1))
    assert answer.pop("seconds") >= 0
    assert answer == {"success": True, "version": "mine", "fingerprint": "f00", "note": "version_1"}


async def test_an_own_method_of_a_derived_engine_is_called(checkpoint):
    class Recording(SGLangEngine):
        async def update_weights_from_checkpoint(self, checkpoint_path):
            return {"success": True, "seen": checkpoint_path}

    (answer,) = await sync_weights_to_engines([Recording("http://127.0.0.1:1")], checkpoint(1))
    assert answer["seen"].endswith("version_1")


async def test_one_server_is_updated_by_one_call(fleet, checkpoint):
    assert (await update_vllm_weights_from_disk(fleet.vllm.url, checkpoint(1)))["version"] == "version_1"
    assert (await update_sglang_weights_from_disk(f"{fleet.sglang.url}/", checkpoint(1), timeout=DEADLINE_S))["success"]
    fleet.check(1, but=CUSTOM)


async def test_a_server_that_does_not_say_what_it_serves_stays_paused_if_it_cannot_go_back(fleet, checkpoint):
    for path in ("/model_info", "/get_model_info"):
        fleet.sglang.faults[path] = lambda _: (404, {"detail": "Not Found"})
    custom_fault(fleet, answering({"success": False}))
    with pytest.raises(PublishError, match=r"no earlier version .*stays paused"):
        await sync_weights_to_engines(fleet.engines, checkpoint(1))
    assert fleet.sglang.paused


async def test_settings_of_a_sync_are_checked(checkpoint):
    engine, path = CustomEngine(), checkpoint(1)
    with pytest.raises(ConfigError, match=r"policy \(2\) must be .*at most 1"):
        await sync_weights_to_engines([engine], path, policy=2)
    with pytest.raises(ConfigError, match=r"policy \('most'\)"):
        await sync_weights_to_engines([engine], path, policy="most")
    with pytest.raises(ConfigError, match=r"policy \(True\)"):
        await sync_weights_to_engines([engine], path, policy=True)
    with pytest.raises(ConfigError, match="retries"):
        await sync_weights_to_engines([engine], path, retries=-1)
    with pytest.raises(ConfigTypeError, match="needs `async def update_weights_from_checkpoint"):
        await sync_weights_to_engines(["http://127.0.0.1:1"], path)
    assert engine.version == "default"
