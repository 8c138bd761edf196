"""A Docker daemon that hangs, has ended, or answers too late."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from ludic.envs.code_exec import docker_sandbox
from ludic.envs.code_exec.docker_sandbox import DockerSandboxPool, pull_image, remove_container
from ludic.envs.code_exec.process_sandbox import ProcessSandbox
from ludic.errors import GradingError

docker = pytest.importorskip("docker")
requests = pytest.importorskip("requests")
WAIT_S = 60


class Container:
    """Its removals fail with these errors, then one succeeds."""

    name = "fake"

    def __init__(self, *failures):
        self.failures, self.removed = list(failures), threading.Event()

    def remove(self, force):
        if self.failures:
            raise self.failures.pop(0)
        self.removed.set()


FAILURES = [requests.ReadTimeout("hung"), requests.ConnectionError("away"), docker.errors.APIError("in progress")]


def test_a_removal_is_tried_again_until_the_daemon_answers():
    container = Container(*FAILURES)
    remove_container(container)
    assert container.removed.is_set()
    remove_container(Container(docker.errors.NotFound("gone")))


@pytest.mark.parametrize("failure", FAILURES)
def test_a_removal_that_never_succeeds_is_an_error(failure, monkeypatch):
    monkeypatch.setattr(docker_sandbox, "END_S", -1.0)
    with pytest.raises(GradingError, match="the container fake could not be removed"):
        remove_container(Container(failure))


def test_a_pull_has_a_deadline():
    release = threading.Event()
    client = SimpleNamespace(images=SimpleNamespace(pull=lambda image: release.wait(WAIT_S)))
    with pytest.raises(GradingError, match=r"the image 'x:1' is not there and was not pulled within 0\.01 s"):
        pull_image(client, "x:1", timeout_s=0.01)
    release.set()
    pull_image(client, "x:1")


@pytest.mark.parametrize("failure", FAILURES)
def test_a_pull_that_fails_says_so(failure):
    def pull(image):
        raise failure

    with pytest.raises(GradingError, match="the image 'x:1' is not there and could not be pulled"):
        pull_image(SimpleNamespace(images=SimpleNamespace(pull=pull)), "x:1")


def test_a_container_that_is_created_after_its_loop_has_ended_is_removed(monkeypatch):
    begun, release, container = threading.Event(), threading.Event(), Container()

    def create(*_):
        begun.set()
        assert release.wait(WAIT_S)
        return container

    async def main(pool):
        task = asyncio.create_task(pool._start_sandbox())
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    monkeypatch.setattr(docker_sandbox, "create_container", create)
    pool = DockerSandboxPool(1)
    pool._client = object()
    asyncio.run(main(pool))
    release.set()
    assert container.removed.wait(WAIT_S)


def test_the_thread_of_a_sandbox_ends_though_its_process_does_not():
    def end():
        raise GradingError("it stays")

    sandbox = ProcessSandbox(SimpleNamespace(kill=lambda: None, end=end))
    with pytest.raises(GradingError, match="it stays"):
        asyncio.run(sandbox.stop())
    with pytest.raises(RuntimeError, match="after shutdown"):
        sandbox._thread.submit(print)
