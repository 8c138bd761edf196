"""A loopback server with the OpenAI API. A function of the request body decides the response."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HANG = object()
"""As a response: keep the connection open and silent until the server closes."""
CUT = object()
"""As a response: close the connection without a response."""


def completion(text, finish_reason="stop", **extras):
    """The body of a chat completion. `extras` are added to the choice, except `prompt_token_ids`,
    which is added at the top level as in vLLM."""
    top = {key: extras.pop(key) for key in ("prompt_token_ids",) if key in extras}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason, **extras}
    usage = {"prompt_tokens": 5, "completion_tokens": len(text or ""), "total_tokens": 5 + len(text or "")}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "stub", "choices": [choice], "usage": usage, **top}


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 128  # length of the accept queue; with the default of 5, clients retry after a second


class StubOpenAIServer:
    """`answer(body)` returns a JSON body (status 200), `(status, body)`, `(status, body, headers)`,
    raw text, HANG or CUT."""

    def __init__(self, answer, models=("stub",), *, idle_s=0.2):
        self.answer, self.models = answer, models
        self.bodies, self.headers, self.idle_s = [], [], idle_s
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
            timeout = server.idle_s  # idle limit of a keep-alive connection; closing the server waits for it

            def do_GET(self):
                self.respond({"object": "list", "data": [{"id": name, "object": "model"} for name in server.models]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.bodies.append(body)
                server.headers.append(dict(self.headers))
                self.respond(server.answer(body))

            def respond(self, reply):
                if reply is HANG:
                    server._closing.wait()
                if reply in (HANG, CUT):
                    self.close_connection = True
                    return
                status, content, headers = (
                    reply if isinstance(reply, tuple) and len(reply) == 3 else (*as_status_and_body(reply), {})
                )
                data = (content if isinstance(content, str) else json.dumps(content)).encode()
                self.send_response(status)
                for name, value in {"content-type": "application/json", "content-length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        return Handler


def as_status_and_body(answer):
    return answer if isinstance(answer, tuple) else (200, answer)
