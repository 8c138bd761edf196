"""The first process of a sandbox without a network: serves the gateway's socket file on a port of
the sandbox's loopback device, and runs the agent.

This file is run as a script by an interpreter that imports only the standard library:
`relay.py SOCKET PORT COMMAND...`. The first line of its input is JSON: the variables of the
command, which the arguments of a process would show to every user, and its limits. It ends as the
command did, or at once when its input ends: then nobody waits for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def main(path: str, port: int, command: list[str]) -> int:
    told = json.loads(sys.stdin.readline())
    os.environ.update(told["variables"])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    def reap() -> None:
        """Orphans of the command are children of the first process of a sandbox."""
        pid = -1
        while pid != 0 and not ended.done():
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == process.pid:
                ended.set_result(os.waitstatus_to_exitcode(status))

    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), lambda: os._exit(1))
    ended: asyncio.Future[int] = loop.create_future()
    server = await asyncio.start_server(serve, "127.0.0.1", port, backlog=128)
    for name, most in told["limits"].items():
        resource.setrlimit(getattr(resource, name), (most, most))
    async with server:
        if not command:
            print("ready", flush=True)
            await asyncio.Event().wait()
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except OSError as error:
            print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
            return 127
        loop.add_signal_handler(signal.SIGCHLD, reap)
        reap()
        code = await ended
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
