"""A loopback server that misbehaves. Each path has a function that writes the raw response to the
socket."""

import gzip
import socket
import threading
import time
from urllib.parse import urlsplit

DRIP_S = 0.02
"""Interval between two dripped bytes, short enough that no read timeout ever fires."""


def response_bytes(body=b"{}", status="200 OK", **headers):
    """The bytes of a well-formed response, after which the server closes the connection."""
    body = body if isinstance(body, bytes) else body.encode()
    fields = {
        "content-length": len(body),
        "connection": "close",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


def plain(*args, **headers):
    return lambda server, connection: connection.sendall(response_bytes(*args, **headers))


def silent(server, connection):
    """Read the request and never respond."""
    server.closing.wait()


def drip_head(server, connection):
    """Send one byte of the head at a time, forever."""
    _drip(server, connection, b"HTTP/1.1 200 OK\r\nx: ")


def drip_body(server, connection):
    """Send a whole head, then one byte of the body at a time."""
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    _drip(server, connection, b"")


def _drip(server, connection, begin):
    connection.sendall(begin)
    while not server.closing.wait(DRIP_S):
        connection.sendall(b" ")


def endless(server, connection):
    """Send an endless body, as fast as the client reads."""
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n[")
    while not server.closing.is_set():
        connection.sendall(b"1," * 2**15)
        server.sent += 2**16


def bomb(server, connection):
    """Send 100 KB that decompress to 20 MB."""
    connection.sendall(response_bytes(gzip.compress(b" " * (2 * 10**7), compresslevel=1), content_encoding="gzip"))


def redirect(to, status="307 Temporary Redirect"):
    return plain(b"", status, location=to)


class HostileServer:
    """`HostileServer(silent)` behaves so on every path, `HostileServer(plain(), {"/weight_info":
    drip_body})` on one path.

        with HostileServer(endless) as server:
            Http().request("GET", server.url, ...)
    """

    def __init__(self, usually, by_path=None):
        self.usually, self.by_path = usually, by_path or {}
        self.closing = threading.Event()
        self.requests, self.sent = [], 0
        """`requests`: (path, raw bytes) of each request. `sent`: number of body bytes sent by
        `endless`."""
        self._threads = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)

    def paths(self):
        return [path for path, _ in self.requests]

    def __enter__(self):
        self._accepting.start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        with socket.create_connection(self._listener.getsockname()):  # unblocks accept()
            pass
        self._accepting.join()
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self):
        while True:
            connection, _ = self._listener.accept()
            if self.closing.is_set():
                connection.close()
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            self._threads[-1].start()

    def _serve(self, connection):
        with connection:
            connection.settimeout(5)
            try:
                request = self._request(connection)
                path = urlsplit(request.split(b" ", 2)[1].decode()).path
                self.requests.append((path, request))
                self.by_path.get(path, self.usually)(self, connection)
            except (OSError, IndexError):  # the client went away or sent no request
                pass

    @staticmethod
    def _request(connection):
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(2**16) or raise_disconnected()
        head, _, body = received.partition(b"\r\n\r\n")
        length = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0)
        while len(body) < length:
            body += connection.recv(2**16) or raise_disconnected()
        return head + b"\r\n\r\n" + body


def raise_disconnected():
    raise ConnectionResetError


def timed_call(call, *args, **settings):
    """Returns (what the call returned or raised, how long it took)."""
    start = time.monotonic()
    try:
        outcome = call(*args, **settings)
    except Exception as error:
        outcome = error
    return outcome, time.monotonic() - start
