"""A real OpenEnv server on loopback. Import it only where openenv is installed."""

import socket
import threading
import time
from functools import cache

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    message: str


class Left(Observation):
    message: str


class Countdown(Environment):
    """The server side of `foreign_envs.CountdownClient`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, limit=10):
        super().__init__()
        self.limit, self.left, self.steps = limit, 0, 0

    def reset(self, seed=None, episode_id=None, **settings):
        self.left, self.steps = 2 + (seed or 0) % 3, 0
        return Left(message=f"say {self.left}")

    def step(self, action, timeout_s=None, **settings):
        if action.message == "break":
            raise ZeroDivisionError("deep inside")
        self.steps += 1
        right = action.message == str(self.left)
        self.left -= right
        cut = self.left > 0 and self.steps >= self.limit
        metadata = {"truncated": True} if cut else {}
        return Left(message=f"say {self.left}", reward=float(right), done=self.left == 0 or cut, metadata=metadata)

    @property
    def state(self):
        return State(step_count=self.steps)


@cache
def countdown_url(limit=10) -> str:
    """The URL of a server that runs as long as the process."""
    app = create_fastapi_app(lambda: Countdown(limit), Say, Left, max_concurrent_envs=64)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="websockets-sansio"))
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    deadline = time.monotonic() + 30
    while not server.started:
        if time.monotonic() > deadline:
            raise TimeoutError("the server did not start within 30 s")
        threading.Event().wait(0.01)
    return f"http://127.0.0.1:{listener.getsockname()[1]}"
