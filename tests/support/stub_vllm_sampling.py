"""The sampling endpoints of the vLLM stub: token ids in and out, completions and chat."""

import base64
import hashlib
import threading
import uuid

from faulty_server import Refused

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"


class SamplingEndpoints:
    """A part of `StubVLLM`, which has the settings."""

    def __init__(self, **options):
        self._running = threading.Event()
        self._running.set()
        self._aborting = threading.Event()
        super().__init__(**options)

    def release(self):
        self._running.set()

    def sample(self, prompt, *, max_tokens, seed, temperature=1.0, stop_token_ids=()):
        """(ids, log-probabilities, finish reason, stop reason). The length is clipped silently, as
        vLLM does."""
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

    def _check_and_sample(self, prompt, params):
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

    def _check_model(self, name):
        if name not in (self.model, *self.adapters):
            raise Refused(404, f"The model `{name}` does not exist.", "NotFoundError", "model")

    def _generate(self, body):
        if not self.scale_out:
            return 403, {"detail": "The scale-out endpoints are disabled; start with --enable-scale-out"}
        self._check_model(body.get("model", self.model))
        params = body["sampling_params"]
        prompt = self._read_images(body["token_ids"], body["content_parts"]) if "content_parts" in body else body["token_ids"]
        ids, logprobs, finish, reason = self._check_and_sample(prompt, params)
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
            "routed_experts": self.routed_experts and self.routed_experts([*prompt, *ids]),
        }
        return 200, {
            "request_id": f"generate-tokens-{body.get('request_id', uuid.uuid4().hex)}",
            "model": self.model,
            "output_mode": "tokens",
            "prompt_token_ids": prompt if body.get("return_token_ids") else None,
            "choices": [choice],
        }

    def _read_images(self, ids, parts):
        """The ids with the placeholders of each image in place of its marker."""
        for number, part in enumerate(parts):
            assert part["type"] == "image_url"
            if part["url"] is not None:
                head, _, data = part["url"].partition(";base64,")
                assert head.startswith("data:image/")
                self.images[part["uuid"]] = self.count_placeholders(base64.b64decode(data))
            elif part["uuid"] not in self.images:
                raise Refused(400, f"Cache miss for image at index {number} but data is not provided.")
        counts = iter([self.images[part["uuid"]] for part in parts])
        return [token for each in ids for token in [each] * (next(counts) if each == self.placeholder else 1)]

    def _completions(self, body):
        self._check_model(body.get("model", self.model))
        prompts = body["prompt"]
        prompts = prompts if isinstance(prompts, list) and prompts and isinstance(prompts[0], list) else [prompts]
        choices = []
        for prompt in prompts:
            ids_in = self.encode(prompt) if isinstance(prompt, str) else prompt
            ids, logprobs, finish, reason = self._check_and_sample(ids_in, body)
            wants_ids = body.get("return_token_ids")
            logprobs_of_ids = {
                "token_logprobs": logprobs,
                "tokens": [self.decode([i]) for i in ids],
                "text_offset": [0] * len(ids),
            }
            choices.append(
                {
                    "index": len(choices),
                    "text": self.decode(ids),
                    "finish_reason": finish,
                    "stop_reason": reason,
                    "token_ids": ids if wants_ids else None,
                    "prompt_token_ids": ids_in if wants_ids else None,
                    "logprobs": None if body.get("logprobs") is None else logprobs_of_ids,
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
        ids, logprobs, finish, reason = self._check_and_sample(ids_in, {**body, "logprobs": None})
        content = [
            {"token": self.decode([i]), "logprob": logp, "bytes": None, "top_logprobs": []}
            for i, logp in zip(ids, logprobs, strict=True)
        ]
        wants_ids = body.get("return_token_ids")
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.decode(ids)},
            "finish_reason": finish,
            "stop_reason": reason,
            "logprobs": {"content": content} if body.get("logprobs") else None,
            "token_ids": ids if wants_ids else None,
        }
        return 200, {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice],
            "usage": {"prompt_tokens": len(ids_in), "completion_tokens": len(ids), "total_tokens": len(ids_in) + len(ids)},
            "prompt_token_ids": ids_in if wants_ids else None,
        }

    def encode(self, text):
        """The byte tokenizer's ids."""
        return [byte + 3 for byte in text.encode()]

    def decode(self, ids):
        """The text of the ids; those that the tokenizer lacks decode to nothing."""
        return bytes(i - 3 for i in ids if 3 <= i < 259).decode(errors="replace")
