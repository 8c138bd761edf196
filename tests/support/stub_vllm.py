"""A vLLM server on loopback in this process: the endpoints, bodies, statuses and faults that vLLM
0.32 was seen to have.

What it samples is a function of the prompt's ids, the seed, the position and `weights`, so that a
change of weights shows. Ids are drawn from a vocabulary larger than the tokenizer's. Faults are
given by `fail`, and `dead` is an engine that is gone while /health still answers.

    with StubVLLM() as server:
        VLLMChatClient(host="127.0.0.1", port=server.port)
"""

import hashlib
import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from ludic.inference.vllm.in_server.secret_middleware import refusal

HANG = object()
"""As a fault: the connection stays open and silent until the server closes."""
CUT = object()
"""As a fault: the connection is closed in the middle."""
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"


class Refused(Exception):
    """Answered with a status and vLLM's form of an error."""

    def __init__(self, status, message, kind="BadRequestError", param=None):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class StubVLLM:
    """One server. Settings may be changed while it runs."""

    def __init__(
        self,
        *,
        model="tiny",
        max_model_len=512,
        vocabulary=384,
        eos_id=2,
        scale_out=True,
        dev_mode=True,
        manifest=None,
        echo_tags=False,
        port=0,
        secret=None,
    ):
        self.model, self.max_model_len, self.vocabulary, self.eos_id = model, max_model_len, vocabulary, eos_id
        self.scale_out, self.dev_mode, self.echo_tags = scale_out, dev_mode, echo_tags
        self.secret = secret
        """Asked for as a server does that we start; None as one of somebody else's."""
        self.manifest = manifest
        """Name -> shape of the weights, where pushes are checked against it."""
        self.weights, self.weight_version = "initial", "default"
        self.staged = None
        self.cache_resets = 0
        self.adapters = {}
        self.dead = False
        self.healthy = True
        self.transfer = None
        """What `/init_weight_transfer_engine` was given."""
        self.requests = []
        """(path, body, headers) of everything that came, in order."""
        self._faults = {}
        self._running = threading.Event()
        self._running.set()
        self._aborting = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._http = _Http(("127.0.0.1", port), self._handler())
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._served = False

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
        """Stop listening: from now on connections are refused."""
        if self._served:
            self._served = False
            self._closing.set()
            self._running.set()
            self._http.shutdown()
            self._thread.join()
            self._http.server_close()

    def fail(self, path, *faults):
        """Answer the next requests to a path with these, one each: (status, body), HANG, CUT, or
        a function of the usual answer."""
        self._faults.setdefault(path, []).extend(faults)

    def asked(self, path):
        """Bodies of the requests to a path so far."""
        return [body for seen, body, _ in self.requests if seen == path]

    # -- what it samples

    def sample(self, prompt, *, max_tokens, seed, temperature=1.0, stop_token_ids=()):
        """(ids, log-probabilities, finish reason, stop reason): the length is clipped without a
        word, as the server does it."""
        room = min(max_tokens, self.max_model_len - len(prompt))
        ids, logprobs = [], []
        while len(ids) < room:
            key = f"{self.weights}|{prompt}|{seed if temperature else 'greedy'}|{len(ids)}"
            digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
            token = self.eos_id if digest[0] < 12 else int.from_bytes(digest[1:4], "little") % self.vocabulary
            ids.append(token)
            logprobs.append(-0.001 - digest[4] / 64)
            if token == self.eos_id:
                return ids, logprobs, "stop", None
            if token in stop_token_ids:
                return ids, logprobs, "stop", token
        return ids, logprobs, "length", None

    def _sampled(self, prompt, params):
        if not prompt:
            raise Refused(400, "prompt must not be empty")
        if any(not 0 <= token < self.vocabulary for token in prompt):
            raise Refused(400, "Token id out of vocabulary")
        if len(prompt) > self.max_model_len:
            raise Refused(400, f"This model's maximum context length is {self.max_model_len} tokens", param="input_tokens")
        if len(prompt) == self.max_model_len:
            raise Refused(400, "max_tokens must be at least 1, got 0")
        temperature = params.get("temperature", 1.0)
        if temperature < 0:
            raise Refused(400, f"temperature must be non-negative, got {temperature}")
        if params.get("n", 1) < 1:
            raise Refused(400, "n must be at least 1")
        if (params.get("logprobs") or 0) > 20 or (params.get("top_logprobs") or 0) > 20:
            raise Refused(400, "Requested sample logprobs greater than max allowed: 20")
        waited = not self._running.is_set()
        self._running.wait()
        if self._closing.is_set():
            raise ConnectionAbortedError
        if self.dead:
            raise Refused(500, DEAD, "InternalServerError")
        seed = params.get("seed")
        ids, logprobs, finish, reason = self.sample(
            prompt,
            max_tokens=params.get("max_tokens") or 16,
            seed=uuid.uuid4().hex if seed is None else seed,
            temperature=temperature,
            stop_token_ids=params.get("stop_token_ids") or (),
        )
        if waited and self._aborting.is_set():
            ids, logprobs, finish = ids[:1], logprobs[:1], "abort"
        return ids, logprobs, finish, reason

    # -- sampling endpoints

    def _check_model(self, name):
        if name not in (self.model, *self.adapters):
            raise Refused(404, f"The model `{name}` does not exist.", "NotFoundError", "model")

    def _generate(self, body):
        if not self.scale_out:
            return 403, {"detail": "The scale-out endpoints are disabled; start with --enable-scale-out"}
        self._check_model(body.get("model", self.model))
        params = body["sampling_params"]
        ids, logprobs, finish, reason = self._sampled(body["token_ids"], params)
        content = [
            {"token_id": token, "logprob": logp, "rank": 1, "top_logprobs": [{"token_id": token, "logprob": logp, "rank": 1}]}
            for token, logp in zip(ids, logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "finish_reason": finish,
            "stop_reason": reason,
            "token_ids": ids,
            "weight_versions": [{"version": self.weight_version, "start": 0, "end": len(ids)}],
            "logprobs": {"content": content} if params.get("logprobs") is not None else None,
        }
        return 200, {
            "request_id": f"generate-tokens-{body.get('request_id', uuid.uuid4().hex)}",
            "model": self.model,
            "output_mode": "tokens",
            "prompt_token_ids": body["token_ids"] if body.get("return_token_ids") else None,
            "choices": [choice],
        }

    def _completions(self, body):
        self._check_model(body.get("model", self.model))
        prompts = body["prompt"]
        prompts = prompts if isinstance(prompts, list) and prompts and isinstance(prompts[0], list) else [prompts]
        choices = []
        for prompt in prompts:
            ids_in = self.encode(prompt) if isinstance(prompt, str) else prompt
            ids, logprobs, finish, reason = self._sampled(ids_in, body)
            asked = body.get("return_token_ids")
            listed = {"token_logprobs": logprobs, "tokens": [self.decode([i]) for i in ids], "text_offset": [0] * len(ids)}
            choices.append(
                {
                    "index": len(choices),
                    "text": self.decode(ids),
                    "finish_reason": finish,
                    "stop_reason": reason,
                    "token_ids": ids if asked else None,
                    "prompt_token_ids": ids_in if asked else None,
                    "logprobs": None if body.get("logprobs") is None else listed,
                }
            )
        return 200, {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": 1,
            "model": self.model,
            "choices": choices,
        }

    def _chat(self, body):
        self._check_model(body.get("model", self.model))
        if body.get("logprobs") not in (None, True, False, 0, 1):
            raise Refused(400, "1 validation error: Input should be a valid boolean", "Bad Request", "body.logprobs")
        text = "".join(f"<|{m['role']}|>{m.get('content') or ''}" for m in body["messages"]) + "<|assistant|>"
        ids_in = self.encode(text)
        ids, logprobs, finish, reason = self._sampled(ids_in, {**body, "logprobs": None})
        content = [
            {"token": self.decode([i]), "logprob": logp, "bytes": None, "top_logprobs": []}
            for i, logp in zip(ids, logprobs, strict=True)
        ]
        asked = body.get("return_token_ids")
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.decode(ids)},
            "finish_reason": finish,
            "stop_reason": reason,
            "logprobs": {"content": content} if body.get("logprobs") else None,
            "token_ids": ids if asked else None,
        }
        return 200, {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice],
            "usage": {"prompt_tokens": len(ids_in), "completion_tokens": len(ids), "total_tokens": len(ids_in) + len(ids)},
            "prompt_token_ids": ids_in if asked else None,
        }

    def encode(self, text):
        """The byte tokenizer's ids."""
        return [byte + 3 for byte in text.encode()]

    def decode(self, ids):
        """Ids that no tokenizer knows decode to nothing."""
        return bytes(i - 3 for i in ids if 3 <= i < 259).decode(errors="replace")

    # -- weights, as with VLLM_SERVER_DEV_MODE=1

    def _weights(self, path, query, body):
        """Status and body of an endpoint of the control plane; None for a path that is none of
        them."""
        if path == "/pause":
            self._aborting.set() if query.get("mode", ["abort"])[0] == "abort" else self._aborting.clear()
            self._running.clear()
            return 200, {"status": "paused"}
        if path == "/resume":
            self._running.set()
            return 200, {"status": "resumed"}
        if path == "/is_paused":
            return 200, {"is_paused": not self._running.is_set()}
        if path == "/init_weight_transfer_engine":
            if "init_info" not in body:
                raise Refused(400, "Field required", "Bad Request", "body.init_info")
            self.transfer = body["init_info"]
            return 200, {"message": "Weight transfer initialized"}
        if path == "/start_weight_update":
            self.staged = {}
            return 200, {"message": "Weight update started"}
        if path == "/update_weights":
            return self._update_weights(body)
        if path == "/finish_weight_update":
            if self.staged is None:
                raise Refused(500, "No weight update in progress", "InternalServerError")
            self.weights, self.staged = f"pushed-{json.dumps(self.staged, sort_keys=True)}", None
            self.weight_version = body.get("weight_version") or self.weight_version
            return 200, {"message": "Weight update finished"}
        if path == "/update_weight_version":
            self.weight_version = body["new_version"]
            return 200, {"success": True, "new_version": self.weight_version}
        if path == "/weight_info":
            return 200, {"weight_version": self.weight_version}
        if path == "/reset_prefix_cache":
            self.cache_resets += 1
            return 200, {}
        if path == "/get_world_size":
            return 200, {"world_size": 1}
        if path == "/collective_rpc":
            return 200, {"results": [None]}
        if path == "/server_info":
            return 200, {"vllm_config": {"model_config": {"model": self.model, "logprobs_mode": "processed_logprobs"}}}
        return None

    def _update_weights(self, body):
        if self.staged is None:
            raise Refused(500, "No weight update in progress", "InternalServerError")
        info = body.get("update_info") or {}
        for name, shape in zip(info.get("names", ()), info.get("shapes", ()), strict=True):
            if self.manifest is not None and list(self.manifest.get(name, shape)) != list(shape):
                self.dead, self.staged = True, None
                raise Refused(500, "", "InternalServerError")  # seen: an empty message, and an engine that is gone
        self.staged.update(info)
        return 200, {"message": "Weights updated"}

    def _adapters(self, path, body):
        name = body.get("lora_name")
        if path == "/v1/load_lora_adapter":
            if name in self.adapters and not body.get("load_inplace"):
                raise Refused(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
            self.adapters[name] = body["lora_path"]
            return 200, f"Success: LoRA adapter '{name}' added successfully."
        if name not in self.adapters:
            raise Refused(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        del self.adapters[name]
        return 200, f"Success: LoRA adapter '{name}' removed successfully."

    # -- HTTP

    def answer(self, method, path, query, body):
        """Status and body of a request. Override or wrap it for endpoints of your own."""
        if path == "/health":
            return (200, "") if self.healthy else (503, "")
        if path == "/v1/models":
            names = [self.model, *self.adapters]
            return 200, {
                "object": "list",
                "data": [{"id": n, "object": "model", "max_model_len": self.max_model_len} for n in names],
            }
        sampling = {GENERATE: self._generate, COMPLETIONS: self._completions, CHAT: self._chat}.get(path)
        if sampling is not None:
            return sampling(body) if method == "POST" else (405, {"detail": "Method Not Allowed"})
        if path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            return self._adapters(path, body)
        found = self._weights(path, query, body) if self.dev_mode else None
        return (404, {"detail": "Not Found"}) if found is None else found

    def _tagged(self, answer, body, headers):
        tag = headers.get("x-vllm-client-tag") or (body.get("client_tag") if isinstance(body, dict) else None)
        if self.echo_tags and tag and isinstance(answer, dict):
            answer["metadata"] = {"client_tag": tag}
            for choice in answer.get("choices", ()):
                choice["metadata"] = {"client_tag": tag}
        return answer

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
                refused = server.secret and refusal(server.secret, method, parts.path, headers)
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
                self.respond(status, server._tagged(answer, body, headers))

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
