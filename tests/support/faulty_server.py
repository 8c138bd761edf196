"""An HTTP server on loopback in this process that records its requests and fails on demand. A
subclass answers."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from ludic.inference.vllm.in_server.secret_middleware import find_refusal

HANG = object()
"""As a fault: the connection stays open and silent until the server closes."""
CUT = object()
"""As a fault: the connection is closed in the middle."""


class Refused(Exception):
    """A request that is answered with a status and vLLM's form of an error."""

    def __init__(self, status, message, kind="BadRequestError", param=None):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class FaultyServer:
    """One server. `fail` makes the next requests to a path fail."""

    def __init__(self, *, port=0, secret=None):
        self.secret = secret
        """The secret that requests need, as at a server that we start. None: they need none."""
        self.requests = []
        """(path, body, headers) of all requests, in order. Names of headers are lower case."""
        self._faults = {}
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._http = _Http(("127.0.0.1", port), self._handler())
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._served = False

    def answer(self, method, path, query, body):
        """Status and body of a request."""
        raise NotImplementedError

    def decorate(self, answer, body, headers):
        """The body of a response, after faults. A subclass may add to it."""
        return answer

    def release(self):
        """Let waiting requests go on. Called when the server closes."""

    @property
    def port(self):
        return self._http.server_address[1]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        self._thread.start()
        self._served = True
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Stop listening. Connections are refused from now on."""
        if self._served:
            self._served = False
            self._closing.set()
            self.release()
            self._http.shutdown()
            self._thread.join()
            self._http.server_close()

    def fail(self, path, *faults):
        """Answer the next requests to a path with these faults, one each: (status, body), HANG,
        CUT, or a function of the usual answer."""
        self._faults.setdefault(path, []).extend(faults)

    def bodies(self, path):
        """The bodies of the requests to a path so far."""
        return [body for requested, body, _ in self.requests if requested == path]

    def _handler(server):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 5

            def do_GET(self):
                self.serve("GET", {})

            def do_POST(self):
                data = self.rfile.read(int(self.headers.get("content-length") or 0))
                try:
                    self.serve("POST", json.loads(data) if data else {})
                except json.JSONDecodeError:
                    self.respond(400, Refused(400, "JSON decode error", "Bad Request").body)

            def serve(self, method, body):
                parts = urlsplit(self.path)
                headers = {name.lower(): value for name, value in self.headers.items()}
                with server._lock:
                    server.requests.append((parts.path, body, headers))
                    faults = server._faults.get(parts.path)
                    fault = faults.pop(0) if faults else None
                if fault is HANG:
                    server._closing.wait()
                if fault in (HANG, CUT):
                    self.close_connection = True
                    return
                refused = server.secret and find_refusal(server.secret, method, parts.path, headers)
                if refused:
                    self.respond(refused[0], Refused(*refused).body)
                    return
                try:
                    status, answer = (
                        fault if isinstance(fault, tuple) else server.answer(method, parts.path, parse_qs(parts.query), body)
                    )
                except Refused as refused:
                    status, answer = refused.status, refused.body
                except ConnectionAbortedError:
                    self.close_connection = True
                    return
                if callable(fault):
                    answer = fault(answer)
                self.respond(status, server.decorate(answer, body, headers))

            def respond(self, status, answer):
                data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def handle_one_request(self):
                try:
                    super().handle_one_request()
                except (BrokenPipeError, ConnectionResetError):  # the client went away
                    self.close_connection = True

            def log_message(self, *_):
                pass

        return Handler
