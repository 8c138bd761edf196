"""An SGLang server on loopback, with the endpoints and bodies that the sources of 0.5.23 define. It
was not compared with a real server.

From the sources: paths, request fields, `success` and `message`, `weight_version` in `meta_info`.
From memory: an entry of `output_token_logprobs` is [log-probability, token id, text], and
`finish_reason` is an object.
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
    load."""

    def __init__(self, model, sampled=(5, 6, 2)):
        self.sampled, self.fails_on, self.finish = list(sampled), None, {"type": "stop", "matched": 2}
        self.served, self.version, self.paused = load_file(model / "model.safetensors"), "default", False
        self.calls = []
        self.was_paused = []
        """For each load, whether generation was paused."""
        self._http = _Http(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self):
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def answer(self, path, body):
        self.calls.append((path, body))
        if path == "/pause_generation":
            self.paused = True
            return 200, {"status": "ok"}
        if path == "/continue_generation":
            self.paused = False
            return 200, {"status": "ok"}
        if path == "/update_weights_from_disk":
            return self._update(body)
        if path == "/update_weight_version":
            assert body["abort_all_requests"] is False
            self.version = body["new_version"]
            return 200, {"success": True, "message": f"Weight version updated to {self.version}", "new_version": self.version}
        if path == "/generate":
            return 200, self._generated(body)
        return 404, {"detail": "Not Found"}

    def _update(self, body):
        self.was_paused.append(self.paused)
        folder = Path(body["model_path"])
        if body["weight_version"] == self.fails_on or not (folder / "config.json").exists():
            return 400, {"success": False, "message": f"Failed to update weights: {folder}", "num_paused_requests": 0}
        assert body["flush_cache"] is True
        self.served, self.version = load_file(folder / "model.safetensors"), body["weight_version"]
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _generated(self, body):
        ids = self.sampled[: body["sampling_params"]["max_new_tokens"]]
        meta = {
            "id": "1",
            "finish_reason": self.finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "weight_version": self.version,
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5 - index, token, None] for index, token in enumerate(ids)]
        return {"text": "", "output_ids": ids, "meta_info": meta}


def _handler(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 5
        disable_nagle_algorithm = True

        def do_POST(self):
            status, content = server.answer(self.path, json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}"))
            data = json.dumps(content).encode()
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
