"""The first process of a sandbox without a network: serves the gateway's socket file on a port of
the sandbox's loopback device, and runs the agent.

This file is run as a script by an interpreter that imports only the standard library:
`relay.py SOCKET PORT COMMAND...`. Its input is the variables of the command, as JSON, which the
arguments of a process would show to every user. It ends as the command did.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys

PROCESSES, FILE_BYTES = 512, 1 << 30
"""Limits of the command: its processes and threads, and the size of a file that it writes."""


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
    os.environ.update(json.load(sys.stdin))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", port, backlog=128)
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    async with server:
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
        except OSError as error:
            print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
            return 127
        code = await process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
