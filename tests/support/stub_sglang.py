"""An SGLang server on loopback, with the endpoints and bodies that the sources of 0.5.23 define:
paths, request fields, statuses, `success` and `message`, and the `meta_info` of a completion.
`/model_info` says the path and the version that were loaded last, also during a pause; requests
wait during a pause.
"""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from safetensors.torch import load_file


class _Http(ThreadingHTTPServer):
    daemon_threads = True


class StubSGLang:
    """`sampled` are the token ids of every response. `fails_on` is a weight version that it cannot
    load. `faults[path]` is called with the body of each request to that path before the response:
    it may block, change the server, return another (status, content), or raise
    ConnectionAbortedError, which closes the connection."""

    def __init__(self, model, sampled=(5, 6, 2)):
        self.model = model
        self.prompt_tokens = None
        """Of prompts with images, which it writes out."""
        self.sampled, self.fails_on, self.finish = list(sampled), None, {"type": "stop", "matched": 2}
        self.spans = None
        """`weight_versions` of the answers, if a push came between their tokens."""
        self.faults, self.closing = {}, threading.Event()
        self._running = threading.Event()
        self.restart()
        self.calls, self.answered = [], []
        """Paths and bodies of all requests, and the version of each answer to /generate."""
        self.was_paused = []
        """For each load, whether generation was paused."""
        self._http = _Http(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    def restart(self):
        """Restart as after a crash: it serves the model that it was started with."""
        self.served, self.version, self.folder = load_file(self.model / "model.safetensors"), "default", str(self.model)
        self._running.set()

    @property
    def paused(self):
        return not self._running.is_set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def paths(self):
        return [path for path, _ in self.calls]

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self._running.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def answer(self, path, body):
        if path == "/metrics":
            return 404, {"detail": "Not Found"}  # without --enable-metrics
        self.calls.append((path, body))
        fault = self.faults[path](body) if path in self.faults else None
        if fault is not None:
            return fault
        if path == "/pause_generation":
            self._running.clear()
            return 200, {"message": "Generation paused successfully.", "status": "ok"}
        if path == "/continue_generation":
            self._running.set()
            return 200, {"message": "Generation continued successfully.", "status": "ok"}
        if path == "/model_info":
            return 200, {"model_path": self.folder, "weight_version": self.version, "is_generation": True}
        if path == "/update_weights_from_disk":
            return self._update(body)
        if path == "/update_weight_version":
            assert body["abort_all_requests"] is False
            self.version = body["new_version"]
            return 200, {"success": True, "message": f"Weight version updated to {self.version}", "new_version": self.version}
        if path == "/generate":
            self._running.wait()
            self.answered.append(self.version)
            return 200, self._generated(body)
        return 404, {"detail": "Not Found"}

    def _update(self, body):
        self.was_paused.append(self.paused)
        folder = Path(body["model_path"])
        if body["weight_version"] == self.fails_on or not (folder / "config.json").exists():
            return 400, {"success": False, "message": f"Failed to update weights: {folder}", "num_paused_requests": 0}
        assert body["flush_cache"] is True
        self.served, self.version = load_file(folder / "model.safetensors"), body["weight_version"]
        self.folder = str(folder)
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _generated(self, body):
        ids = self.sampled[: body["sampling_params"]["max_new_tokens"]]
        spans = self.spans or [{"version": self.version, "start": 0, "end": len(ids)}]
        meta = {
            "id": "1",
            "finish_reason": self.finish,
            "prompt_tokens": self.prompt_tokens or len(body["input_ids"]),
            "completion_tokens": len(ids),
            "weight_versions": spans,
            "weight_version": spans[-1]["version"],
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5 - index, token, None] for index, token in enumerate(ids)]
        return {"text": "", "output_ids": ids, "meta_info": meta}


def _handler(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 5
        disable_nagle_algorithm = True

        def do_GET(self):
            self._respond({})

        def do_POST(self):
            self._respond(json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}"))

        def _respond(self, body):
            try:
                status, content = server.answer(self.path, body)
            except ConnectionAbortedError:
                self.close_connection = True
                return
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            if self.close_connection:
                self.send_header("connection", "close")
            with contextlib.suppress(OSError):
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    return Handler
