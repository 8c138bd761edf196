"""`ludic worker server`: a server under a name, at an address that it says."""

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import fake_vllm
import pytest
from jumping_loop import play_jumping
from processes import wait_for_end

from ludic.errors import TRY_AGAIN, ConfigError, EngineDeadError, InferenceError
from ludic.inference.vllm.endpoints import VllmEndpoints
from ludic.inference.vllm.in_server.secret import HEADER
from ludic.launch.local import LOOPBACK
from ludic.recipes.compose import compose
from ludic.runs import servers
from ludic.runs.directory import RunDirectory
from ludic.runs.servers import ServerAddresses, _choose_port, _serve, run_server_process
from ludic.runs.stop_request import Interrupted

DEADLINE_S = 60.0


class World:
    """A run whose only server is a fake."""

    def __init__(self, folder: Path) -> None:
        self.recipe = compose(["sort", "servers=1", f"inference.python={fake_vllm.install(folder / 'venv')}"])
        self.directory = RunDirectory(folder / "run")
        self.addresses = ServerAddresses(self.directory.servers)
        self.facts = folder / "facts.json"

    def make_model(self) -> None:
        self.directory.model.mkdir(parents=True)
        (self.directory.model / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))

    def serve(self) -> asyncio.Task[int]:
        return asyncio.create_task(_serve(self.recipe, self.directory, "server0", LOOPBACK))

    async def find_url(self, serving: asyncio.Task[int]) -> str:
        async with asyncio.timeout(DEADLINE_S):
            while (url := self.addresses.read("server0")) is None:
                assert not serving.done()
                await asyncio.sleep(0.01)
        return url


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("FAKE_VLLM_FACTS", str(tmp_path / "facts.json"))
    monkeypatch.setenv("LUDIC_SERVER_SECRETS", str(tmp_path / "secrets"))
    monkeypatch.delenv("LUDIC_SERVER_SECRET", raising=False)
    return World(tmp_path)


async def test_a_server_says_where_it_is_and_ends_for_a_restart_when_it_dies(world: World) -> None:
    world.make_model()
    serving = world.serve()
    url = await world.find_url(serving)
    headers = world.addresses.secret_headers()
    assert VllmEndpoints(url, headers=headers).weight_version() == "default"
    facts = json.loads(world.facts.read_text())
    arguments = facts["arguments"]
    assert arguments[arguments.index("--host") + 1] == LOOPBACK
    assert '"backend": "disk"' in arguments[arguments.index("--weight-transfer-config") + 1]
    assert facts["environment"]["LUDIC_SERVER_SECRET"] == headers[HEADER]
    os.kill(_parent_of(facts["child"]), signal.SIGKILL)
    assert await asyncio.wait_for(serving, DEADLINE_S) == TRY_AGAIN
    assert world.addresses.read("server0") is None
    assert wait_for_end(facts["child"])  # with all that the server started


async def test_a_signal_ends_a_server_that_waits_for_the_warm_up(world: World) -> None:
    serving = world.serve()
    async with asyncio.timeout(DEADLINE_S):
        while not world.directory.servers.exists():
            assert not serving.done()
            await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(serving, DEADLINE_S) == 128 + signal.SIGTERM
    assert not world.facts.exists()


def test_a_run_without_servers_has_none_to_start(tmp_path: Path) -> None:
    RunDirectory.begin(compose(["sort", f"output={tmp_path}", "name=run"])).release()
    with pytest.raises(ConfigError, match="without servers of its own"):
        run_server_process(tmp_path / "run", name="server0", host=LOOPBACK)


def test_the_port_of_the_life_before_is_taken_again_if_it_is_free() -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        port = taken.getsockname()[1]
        assert _choose_port(LOOPBACK, f"http://{LOOPBACK}:{port}") != port
    assert _choose_port(LOOPBACK, f"http://{LOOPBACK}:{port}") == port
    assert _choose_port(LOOPBACK, f"http://elsewhere:{port}") != port
    assert _choose_port(LOOPBACK, None) > 0


async def test_a_server_that_never_answers_is_named_and_a_stop_ends_the_wait(world: World, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        await wait_for_server(world, is_stopped=True)
    world.make_model()
    world.addresses.write("server0", "http://127.0.0.1:9")  # of an earlier launch
    with pytest.raises(
        InferenceError, match=r"server0 did not answer within 0 s \(inference\.timeout_s\); see workers/server0\.log"
    ):
        await wait_for_server(world)


def test_a_wait_for_servers_ends_where_there_is_never_a_policy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "POLL_S", 600.0)
    with pytest.raises(InferenceError, match=r"run/model .*within 24 hours; .*trainer"):
        play_jumping(asyncio.wait_for(wait_for_server(world), 25 * 3600.0))


def test_a_wait_for_servers_ends_where_none_will_answer(world: World) -> None:
    end = "every server has failed more often than place.restarts allows"
    with pytest.raises(EngineDeadError, match=end):
        play_jumping(asyncio.wait_for(wait_for_server(world, end=end), 3600.0))


async def wait_for_server(world: World, *, is_stopped: bool = False, end: str | None = None) -> list[str]:
    return await servers._wait_for_addresses(
        world.addresses, ["server0"], world.directory.model, 0.0, lambda: is_stopped, lambda: end
    )


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
