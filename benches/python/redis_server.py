"""A Redis server of one's own for tests and measurements: on a free loopback port, with its data in
a given folder, ended by its process number. It can be killed, wiped and started again.

`make redis` fetches the program from Debian's packages.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from ludic.inference.servers.ports import free_port

ROOT = Path(__file__).parents[2]
START_S = 30.0
"""It starts in 0.1 s on an idle machine."""


def find_redis_server() -> str | None:
    """Path of the program: LUDIC_REDIS_SERVER, target/redis/redis-server, or one on PATH; None if
    there is none."""
    fetched = ROOT / "target" / "redis" / "redis-server"
    named = os.environ.get("LUDIC_REDIS_SERVER")
    if named:
        return named
    return str(fetched) if fetched.exists() else shutil.which("redis-server")


class RedisServer:
    """A server with its data in `folder`, started by `start` or by a `with` statement.

    `settings`: further settings by name, such as `{"maxmemory": "10mb"}`. With `tls_port` among
    them, `url` is not reachable and the caller makes its own.
    """

    def __init__(self, folder: Path, program: str, **settings: str) -> None:
        self.folder = folder
        self.port = free_port()
        self._program = program
        self._settings = {"appendonly": "yes", "appendfsync": "everysec", "save": "", **settings}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start the process and wait until it has read its data and accepts commands."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fixed = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self.folder), "logfile": str(self.folder / "redis.log")}
        settings = [part for name, value in {**fixed, **self._settings}.items() for part in (f"--{name}", value)]
        self._process = subprocess.Popen([self._program, *settings], stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"redis-server did not start:\n{(self.folder / 'redis.log').read_text()[-2000:]}")
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL, at whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: connections are accepted by the kernel, and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wipe(self) -> None:
        """Delete the data of the killed server."""
        shutil.rmtree(self.folder / "appendonlydir", ignore_errors=True)

    def _answers(self) -> bool:
        """Whether it replies to PING otherwise than that it is still loading. A reply that a
        password is needed counts."""
        port = int(self._settings.get("tls-port", self.port))
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
                if "tls-port" in self._settings:
                    return True
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False
