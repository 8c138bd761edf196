"""A stub server that accepts pushed weights: the endpoints of vLLM 0.32 on loopback, with the same
weight receiver that runs in vLLM's workers.

As in vLLM: a failed update aborts the update and a failed finish does not, a second start is
refused, workers handle one call at a time, nothing is answered during a pause, and a restarted
server has its initial weights and version `default`.
"""

import asyncio
import contextlib
import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import torch
from safetensors.torch import save_file

from ludic.inference.vllm.in_server.adapter_uploads import UPLOADS, AdapterStore
from ludic.inference.vllm.in_server.secret_middleware import find_refusal
from ludic.inference.vllm.in_server.weight_fingerprint import SleepCheck, fingerprint
from ludic.inference.vllm.in_server.weight_receiver import Checkpoint, WeightReceiver

SHAPES = {
    "model.embed_tokens.weight": (12, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.k_proj.weight": (4, 4),
    "model.layers.1.mlp.up_proj.weight": (8, 4),
    "model.norm.weight": (4,),
}


def weights(seed, dtype=torch.float32):
    """Random weights, so small that a push takes milliseconds."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class StubWeightServer:
    """`faults[path]` is called with the body of each request to that path before the response. It
    may raise, block, change the server, or return another text as the response."""

    def __init__(self, folder, *, backend="gloo", tied=False, dtype="float32", first=None, address=("127.0.0.1", 0)):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "model.safetensors").exists():
            save_file(first or weights(0), folder / "model.safetensors")
        self.folder, self.backend, self.tied, self.dtype = folder, backend, tied, dtype
        self.faults, self.calls, self.queries = {}, [], []
        self.bytes_received = 0
        """Of all requests, with their headers."""
        self._store = AdapterStore()
        self.secret = None
        """The secret that requests must carry, as for a server that ludic started. None: no secret
        is required."""
        self.headers = []
        """The headers of all requests, in order. Names are lower case."""
        self.without_extension = self.loads_nothing = False
        self.has_sleep_mode, self.leaks, self.forgets = True, False, False
        """Whether it was started with --enable-sleep-mode; faults: a sleep frees nothing, or its
        level 1 loses weights."""
        self.card = None
        """Called with the bytes that the server has on its device whenever these change."""
        self.closing = threading.Event()
        self._boot()
        self._http = _Server(address, _handler(self))
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    def _boot(self):
        checkpoint = Checkpoint(self.folder)
        self.boot = uuid.uuid4().hex
        self.receiver = WeightReceiver(checkpoint)
        self.served = dict(checkpoint.read(list(checkpoint.weights)))
        self.version, self.paused, self.active, self.cache_is_stale = "default", None, False, False
        self.features_are_stale = False
        self.adapters = {}
        """Name -> folder."""
        self.versions_served = [self.version]
        self.sleeping, self.kept, self.sleep_check = set(), None, None
        self._worker = threading.Lock()

    def restart(self):
        """Restart as after a crash: pushed weights are lost."""
        self.receiver.close()
        self._boot()

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
        self.receiver.close()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def answer(self, path, query, body):
        name = f"{path}:{body['method']}" if path == "/collective_rpc" else path
        self.calls.append((name, body))
        self.queries.append((path, query))
        fault = self.faults[name](body) if name in self.faults else None
        if isinstance(fault, str):
            return fault
        return getattr(self, "on_" + path.strip("/").replace("/", "_"))(query, body)

    def on_pause(self, query, _):
        self.paused = query["mode"][0]

    def on_resume(self, *_):
        assert not self.sleeping, "requests would use keys and values that have no memory"
        self.paused = None

    def on_sleep(self, query, _):
        level, mode = int(query.get("level", ["1"])[0]), query.get("mode", ["abort"])[0]
        if level not in (0, 1, 2) or mode not in ("abort", "wait", "keep"):
            raise Refused(422, "Unprocessable Entity")
        self.paused = mode
        if level and "weights" not in self.sleeping:
            self.kept = {name: tensor.clone() for name, tensor in self.served.items()} if level == 1 else None
            self.sleeping = {"weights", "kv_cache"}
            self.served = {name: torch.full_like(tensor, 123.0) for name, tensor in self.served.items()}
            self._tell_card()
        return {"status": "sleeping", "level": level}

    def on_wake_up(self, query, _):
        tags = query.get("tags")
        if self.sleeping and all(tag in self.sleeping for tag in tags or ()):
            if self.kept is not None and "weights" in (tags or self.sleeping) and not self.forgets:
                self.served, self.kept = self.kept, None
            self.sleeping -= set(tags or self.sleeping)
            self._tell_card()
        self.paused = self.paused if self.sleeping else None
        return {"status": "sleeping" if self.sleeping else "awake", "tags": tags}

    def on_is_sleeping(self, *_):
        return {"is_sleeping": self.paused is not None or bool(self.sleeping)}

    def used_bytes(self):
        """On its device: weights, and four times as much for keys and values."""
        sizes = {"weights": sum(tensor.nbytes for tensor in self.served.values())}
        sizes["kv_cache"] = 4 * sizes["weights"]
        return sum(size for tag, size in sizes.items() if self.leaks or tag not in self.sleeping)

    def _tell_card(self):
        if self.card is not None:
            self.card(self.used_bytes())

    def on_is_paused(self, *_):
        return {"is_paused": self.paused is not None}

    def on_get_world_size(self, *_):
        return {"world_size": 1}

    def on_weight_info(self, *_):
        return {"weight_version": self.version}

    def on_init_weight_transfer_engine(self, _, body):
        info = dict(body["init_info"])
        with self._worker:
            self.receiver.connect(rank=info.pop("rank_offset"), **info)

    def on_start_weight_update(self, *_):
        with self._worker:
            if self.active:
                raise Refused(500, "start_weight_update called while a weight update is already active.")
            self.receiver.start()
            self.active = True

    def on_update_weights(self, _, body):
        with self._worker:
            if not self.active:
                raise Refused(500, "start_weight_update must be called before update_weights.")
            try:
                info = body["update_info"]
                if "delta" in info:
                    self.receiver.receive_delta(info["delta"], info["push_id"], info.get("path"))
                elif "path" in info:
                    self.receiver.read(info["path"], info.get("push_id"))
                else:
                    self.receiver.receive(info["names"], info["dtype_names"], info["shapes"], info.get("push_id"))
            except BaseException:
                self.active = False
                raise

    def on_finish_weight_update(self, _, body):
        with self._worker:
            if not self.active:
                raise Refused(500, "finish_weight_update called without a matching start_weight_update.")
            taken = dict(self.receiver.take())
            assert self.paused == "keep" or self.sleeping or not taken, "weights were loaded while requests ran"
            assert "weights" not in self.sleeping or not taken, "weights were loaded into memory that is not there"
            if taken and not self.loads_nothing:
                self.served.update({name: tensor.to(getattr(torch, self.dtype), copy=True) for name, tensor in taken.items()})
                self.cache_is_stale = self.features_are_stale = True
            self.active = False
            if "weight_version" in body:
                self.version = body["weight_version"]
                self.versions_served.append(self.version)

    def on_reset_prefix_cache(self, query, _):
        assert query["reset_running_requests"] == ["true"], "frozen requests would keep keys and values of the old weights"
        self.cache_is_stale = False
        return {"success": True}

    def on_reset_encoder_cache(self, *_):
        assert not self.cache_is_stale, "frozen requests would still count on the features"
        self.features_are_stale = False

    def on_collective_rpc(self, _, body):
        if self.without_extension:
            raise Refused(500, f"'Worker' object has no attribute '{body['method']}'")
        with self._worker:
            return {"results": [getattr(self, body["method"])(**body["kwargs"])]}

    def ludic_state(self):
        receiver = self.receiver
        state = {"boot": self.boot, "backend": self.backend, "broken": None, "sleeps": self.has_sleep_mode}
        return {**state, "group_id": receiver.group_id, "open": receiver.open, "base": receiver.base_id}

    def ludic_manifest(self):
        own = self.receiver.checkpoint.weights
        weights = {name: {**weight, "dtype": self.dtype} for name, weight in own.items()}
        config = self.folder / "config.json"
        known = {"config": json.loads(config.read_bytes())} if config.is_file() else {}
        return {"dtype": self.dtype, "tied": self.tied, "weights": weights, **known}

    def ludic_discard(self):
        self.receiver.empty()

    def ludic_fingerprint(self):
        assert "weights" not in self.sleeping, "memory that is not there was read"
        fingerprints = self.receiver.fingerprints
        held = {name: self.served[name] for name in fingerprints}
        lost = [] if self.sleep_check is None else self.sleep_check.find_lost(self.served)
        self.sleep_check = self.sleep_check if lost else None
        return {"loaded": fingerprints, "served": fingerprint(held), "broken": None, "lost": lost}

    def ludic_memory(self):
        return {"used": self.used_bytes(), "weights": sum(tensor.nbytes for tensor in self.served.values())}

    def ludic_before_sleep(self, level):
        if self.sleep_check is not None:
            return {**self.ludic_memory(), "used": None}
        assert "weights" not in self.sleeping, "memory that is not there was read"
        self.sleep_check = SleepCheck(level, self.served, {})
        return self.ludic_memory()

    def ludic_after_wake(self):
        return {"changed": [] if self.sleep_check is None else self.sleep_check.find_changed(self.served, {})}

    def on_update_weight_version(self, _, body):
        self.version = body["new_version"]

    def on_ludic_adapters(self, name, content):
        async def receive():
            return {"type": "http.request", "body": content, "more_body": False}

        status, stored = asyncio.run(self._store.store(name, receive))
        if status != 200:
            raise Refused(status, stored["error"]["message"])
        return stored

    def on_health(self, *_):
        return ""

    def on_v1_models(self, *_):
        base = {"id": "tiny", "root": str(self.folder), "parent": None, "max_model_len": 512}
        return {"data": [base, *({"id": name, "root": path, "parent": "tiny"} for name, path in self.adapters.items())]}

    def on_v1_load_lora_adapter(self, _, body):
        if body["lora_name"] in self.adapters:
            raise Refused(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
        self.adapters[body["lora_name"]] = body["lora_path"]
        return f"Success: LoRA adapter '{body['lora_name']}' added successfully."

    def on_v1_unload_lora_adapter(self, _, body):
        if self.adapters.pop(body["lora_name"], None) is None:
            raise Refused(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
        return f"Success: LoRA adapter '{body['lora_name']}' removed successfully."


class Refused(Exception):
    """A request that is rejected with this status."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


def refuse(message="Internal Server Error", status=500):
    """A fault that rejects the request."""

    def fault(_):
        raise Refused(status, message)

    return fault


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def _handler(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 5
        disable_nagle_algorithm = True  # otherwise every response waits 40 ms for the client's acknowledgement

        def do_GET(self):
            self._respond({})

        def do_POST(self):
            self._respond(json.loads(self._read() or b"{}"))

        def do_PUT(self):
            self._respond(self._read())

        def _read(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            server.bytes_received += len(self.raw_requestline) + len(self.headers.as_bytes()) + len(body)
            return body

        def _respond(self, body):
            if server.closing.is_set():  # a keep-alive connection
                self.close_connection = True
                return
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            split = urlsplit(self.path)
            try:
                headers = {name.lower(): value for name, value in self.headers.items()}
                if refused := server.secret and find_refusal(server.secret, self.command, split.path, headers):
                    raise Refused(*refused)
                path, query = split.path, parse_qs(split.query)
                if path.startswith(UPLOADS):
                    path, query = UPLOADS.rstrip("/"), unquote(path.removeprefix(UPLOADS))
                status, content = 200, server.answer(path, query, body)
            except ConnectionAbortedError:  # a fault: the connection is closed without an answer
                self.close_connection = True
                return
            except Refused as error:
                status, content = error.status, {"error": {"message": str(error)}}
            except Exception as error:
                status, content = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
            data = (content if isinstance(content, str) else json.dumps(content or {})).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            if self.close_connection:
                self.send_header("connection", "close")
            with contextlib.suppress(OSError):  # the client did not wait
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    return Handler
