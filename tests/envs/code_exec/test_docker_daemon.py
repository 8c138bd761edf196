"""A Docker daemon that hangs, has ended, or answers too late."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from ludic.envs.code_exec import docker_sandbox
from ludic.envs.code_exec.docker_sandbox import DockerRemover, DockerSandboxPool, pull_image
from ludic.envs.code_exec.process_sandbox import ProcessSandbox
from ludic.errors import GradingError

docker = pytest.importorskip("docker")
requests = pytest.importorskip("requests")
WAIT_S = 60


class Client:
    """Of a daemon whose removals fail with these errors, then one succeeds."""

    def __init__(self, *failures):
        self.failures, self.removed = list(failures), threading.Event()
        self.api = self

    def remove_container(self, name, *, force, v):
        if self.failures:
            raise self.failures.pop(0)
        assert (name, force, v) == ("fake", True, True)
        self.removed.set()


def remove(client):
    DockerRemover(lambda: client).remove("fake")


FAILURES = [requests.ReadTimeout("hung"), requests.ConnectionError("away"), docker.errors.APIError("in progress")]


def test_a_removal_is_tried_again_until_the_daemon_answers():
    client = Client(*FAILURES)
    remove(client)
    assert client.removed.is_set()
    remove(Client(docker.errors.NotFound("gone")))


@pytest.mark.parametrize("failure", FAILURES)
def test_a_removal_that_never_succeeds_is_an_error(failure, monkeypatch):
    monkeypatch.setattr(docker_sandbox, "END_S", -1.0)
    with pytest.raises(GradingError, match="the container fake could not be removed"):
        remove(Client(failure))


def test_a_pull_has_a_deadline():
    release = threading.Event()
    client = SimpleNamespace(images=SimpleNamespace(pull=lambda image: release.wait(WAIT_S)))
    with pytest.raises(GradingError, match=r"image 'x:1' .*not pulled within 0\.01 s"):
        pull_image(client, "x:1", timeout_s=0.01)
    release.set()
    pull_image(client, "x:1")


@pytest.mark.parametrize("failure", FAILURES)
def test_a_pull_that_fails_says_so(failure):
    def pull(image):
        raise failure

    with pytest.raises(GradingError, match=r"image 'x:1' .*could not be pulled"):
        pull_image(SimpleNamespace(images=SimpleNamespace(pull=pull)), "x:1")


def test_a_container_that_is_created_after_its_loop_has_ended_is_removed(monkeypatch):
    begun, release, client = threading.Event(), threading.Event(), Client()

    def create(*_):
        begun.set()
        assert release.wait(WAIT_S)
        return SimpleNamespace(name="fake")

    async def main(pool):
        task = asyncio.create_task(pool._start_sandbox())
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    monkeypatch.setattr(docker_sandbox, "create_container", create)
    pool = DockerSandboxPool(1)
    pool._client = client
    asyncio.run(main(pool))
    release.set()
    assert client.removed.wait(WAIT_S)


def test_the_thread_of_a_sandbox_ends_though_its_process_does_not():
    def end():
        raise GradingError("it stays")

    sandbox = ProcessSandbox(SimpleNamespace(kill=lambda: None, end=end))
    with pytest.raises(GradingError, match="it stays"):
        asyncio.run(sandbox.stop())
    with pytest.raises(RuntimeError, match="after shutdown"):
        sandbox._thread.submit(print)
