"""A vLLM pooling server of a reward model, on loopback in this process. It copies the responses and
errors observed in vLLM 0.32.

`judge(ids)` returns the score. Text is tokenised by bytes, with one leading token if special tokens
are added.
"""

import math

from faulty_server import Refused
from stub_vllm import StubVLLM

BYTE_OFFSET, FIRST = 3, 1


class StubRewardServer(StubVLLM):
    def __init__(self, judge=lambda ids: float(len(ids)), **settings):
        super().__init__(**{"model": "rm", "vocabulary": 272, **settings})
        self.judge = judge

    def answer(self, method, path, query, body):
        if path == "/version":
            return 200, {"version": "0.32.0"}
        if path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"):
            return 404, {"detail": "Not Found"}
        if path == "/classify":
            return self.classify(body)
        return super().answer(method, path, query, body)

    def classify(self, body):
        if body.get("model") not in (None, self.model):
            raise Refused(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        if "normalize" in body:
            raise Refused(400, "Parameter `normalize` was removed; use `use_activation` instead. (parameter=normalize)")
        rows = [self.tokens(prompt, body) for prompt in self.prompts(body["input"])]
        data = [self.entry(index, ids, body) for index, ids in enumerate(rows)]
        token_count = sum(map(len, rows))
        usage = {"prompt_tokens": token_count, "total_tokens": token_count, "completion_tokens": 0, "prompt_tokens_details": None}
        return 200, {"id": "classify-1", "object": "list", "created": 1, "model": self.model, "data": data, "usage": usage}

    def prompts(self, inputs):
        if inputs == []:
            raise Refused(400, "You must pass at least one prompt")
        return [inputs] if isinstance(inputs, str) or isinstance(inputs[0], int) else inputs

    def tokens(self, prompt, body):
        if isinstance(prompt, str):
            ids = [byte + BYTE_OFFSET for byte in prompt.encode()]
            prompt = [FIRST, *ids] if body.get("add_special_tokens", True) else ids
        if not prompt:
            raise Refused(400, "The decoder prompt cannot be empty")
        if max(prompt) >= self.vocabulary:
            raise Refused(400, f"Token id {max(prompt)} is out of vocabulary")
        if len(prompt) > self.max_model_len:
            raise Refused(400, f"This model's maximum context length is {self.max_model_len} tokens.", param="input_tokens")
        return prompt

    def entry(self, index, ids, body):
        score = self.judge(ids)
        numbers = score if isinstance(score, list) else [score]
        if body.get("use_activation", True):  # vLLM ignores unknown fields, so a misspelt one leads here
            numbers = [1 / (1 + math.exp(-number)) for number in numbers]
        return {"index": index, "label": "LABEL_0", "probs": numbers, "num_classes": len(numbers)}
