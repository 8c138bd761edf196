"""A vLLM server on loopback in this process: the endpoints, bodies, statuses and faults that vLLM
0.32 was seen to have.

What it samples depends on the ids of the prompt, the seed, the position and `weights`, so that a
change of weights shows. It samples ids of a vocabulary that is larger than the tokenizer's. `dead`
is an engine that has stopped while /health still answers.

    with StubVLLM() as server:
        VLLMChatClient(host="127.0.0.1", port=server.port)
"""

import json

from faulty_server import FaultyServer, Refused
from stub_vllm_sampling import CHAT, COMPLETIONS, GENERATE, SamplingEndpoints


class StubVLLM(SamplingEndpoints, FaultyServer):
    """Settings may be changed while it runs."""

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
        **options,
    ):
        self.model, self.max_model_len, self.vocabulary, self.eos_id = model, max_model_len, vocabulary, eos_id
        self.scale_out, self.dev_mode, self.echo_tags = scale_out, dev_mode, echo_tags
        self.manifest = manifest
        """Name -> shape of the weights, to check pushes against; None: pushes are not checked."""
        self.weights, self.weight_version = "initial", "default"
        self.staged = None
        self.cache_resets = 0
        self.adapters = {}
        self.placeholder, self.images = None, {}
        """The marker of an image, which the server writes out, and digest -> number of placeholders
        of the images that it has."""
        self.routed_experts = None
        """(ids) -> what the field of this name has in an answer; None: the server was started
        without `--enable-return-routed-experts`, and the field is null."""
        self.dead = False
        self.healthy = True
        self.metrics = None
        """The text of /metrics, which it lacks if None."""
        self.transfer = None
        """The `init_info` of `/init_weight_transfer_engine`."""
        super().__init__(**options)

    def _weights(self, path, query, body):
        """Status and body of an endpoint of the control plane, which vLLM has with
        VLLM_SERVER_DEV_MODE=1; None for another path."""
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
        if path == "/reset_encoder_cache":
            return 200, ""
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
                raise Refused(500, "", "InternalServerError")  # as vLLM does: an empty message, and the engine is gone
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

    def answer(self, method, path, query, body):
        if path == "/health":
            return (200, "") if self.healthy else (503, "")
        if path == "/metrics" and self.metrics is not None:
            return 200, self.metrics
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
        response = self._weights(path, query, body) if self.dev_mode else None
        return (404, {"detail": "Not Found"}) if response is None else response

    def decorate(self, answer, body, headers):
        tag = headers.get("x-vllm-client-tag") or (body.get("client_tag") if isinstance(body, dict) else None)
        if self.echo_tags and tag and isinstance(answer, dict):
            answer["metadata"] = {"client_tag": tag}
            for choice in answer.get("choices", ()):
                choice["metadata"] = {"client_tag": tag}
        return answer
