"""A stub server that samples from the weights that it holds: the endpoints of `StubWeightServer`,
and vLLM's for token ids.

The sampled ids are a fingerprint of the weights (`ids_of`), so that a sample says by itself which
weights it is of, whatever version the server names. `kill` is a crash: connections are refused
until `revive`, which brings it back with the weights that it began with.
"""

import hashlib
import threading

from safetensors.torch import load_file
from stub_weight_server import Refused, StubWeightServer

from ludic.inference.vllm.in_server.weight_fingerprint import fingerprint


def ids_of(weights):
    """Four ids that differ between different weights."""
    text = "".join(digest for _, digest in sorted(fingerprint(weights).items()))
    return list(hashlib.blake2b(text.encode(), digest_size=4).digest())


class StubPolicyServer(StubWeightServer):
    def __init__(self, folder, **options):
        self._life = threading.Condition()
        """Held while what is served changes, and while an answer is made of it."""
        super().__init__(folder, **{"backend": "disk", **options})

    def restart(self):
        with self._life:
            super().restart()
            self._life.notify_all()

    def on_pause(self, query, body):
        with self._life:
            super().on_pause(query, body)

    def on_resume(self, *request):
        with self._life:
            super().on_resume(*request)
            self._life.notify_all()

    def on_sleep(self, query, body):
        with self._life:
            return super().on_sleep(query, body)

    def on_wake_up(self, *request):
        with self._life:
            answer = super().on_wake_up(*request)
            self._life.notify_all()
            return answer

    def on_inference_v1_generate(self, _, body):
        with self._life:
            assert self._life.wait_for(lambda: self.paused is None, timeout=60)
            ids, version = ids_of(self._find_weights(body["model"])), self.version
        ids = ids[: body["sampling_params"]["max_tokens"]]
        choice = {
            "finish_reason": "length",
            "token_ids": ids,
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
            "logprobs": {"content": [{"token_id": token, "logprob": -1.0} for token in ids]},
        }
        return {"choices": [choice], "prompt_token_ids": body["token_ids"]}

    def _find_weights(self, model):
        if "@" not in model:
            return self.served
        if model not in self.adapters:
            raise Refused(404, f"The model `{model}` does not exist.")
        return load_file(f"{self.adapters[model]}/adapter_model.safetensors")

    def on_v1_completions(self, _, body):
        with self._life:
            assert self._life.wait_for(lambda: self.paused is None, timeout=60)
            self._find_weights(body["model"])
        return {"choices": [{"finish_reason": "length"}]}
