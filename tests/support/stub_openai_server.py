"""A server with OpenAI's interface on loopback. What it answers is decided by a function of the
request's body."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HANG = object()
"""Given as answer: the connection stays open and silent until the server closes."""
CUT = object()
"""Given as answer: the connection is closed in the middle."""


def completion(text, finish_reason="stop", **extras):
    """The body of a chat completion. `extras` go into the choice, and `prompt_token_ids` to the
    top, where vLLM has it."""
    top = {key: extras.pop(key) for key in ("prompt_token_ids",) if key in extras}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason, **extras}
    usage = {"prompt_tokens": 5, "completion_tokens": len(text or ""), "total_tokens": 5 + len(text or "")}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "stub", "choices": [choice], "usage": usage, **top}


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 128  # connections that may wait; the default of 5 makes others try again after a second


class StubOpenAIServer:
    """`answer(body)` gives a body of JSON (status 200), `(status, body)` or `(status, body,
    headers)`, text as it is, HANG or CUT."""

    def __init__(self, answer, models=("stub",)):
        self.answer, self.models = answer, models
        self.bodies, self.headers = [], []
        self._closing = threading.Event()
        self._http = _Server(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def base_url(self):
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._closing.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _handler(server):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 0.2  # for the next request on a connection that is kept: closing the server waits for it

            def do_GET(self):
                self.respond({"object": "list", "data": [{"id": name, "object": "model"} for name in server.models]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.bodies.append(body)
                server.headers.append(dict(self.headers))
                self.respond(server.answer(body))

            def respond(self, given):
                if given is HANG:
                    server._closing.wait()
                if given in (HANG, CUT):
                    self.close_connection = True
                    return
                status, content, headers = given if isinstance(given, tuple) and len(given) == 3 else (*_pair(given), {})
                data = (content if isinstance(content, str) else json.dumps(content)).encode()
                self.send_response(status)
                for name, value in {"content-type": "application/json", "content-length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        return Handler


def _pair(given):
    return given if isinstance(given, tuple) else (200, given)
