"""A vLLM pooling server of a reward model, on loopback in this process: answers, refusals and
silences as vLLM 0.32 was seen to have them.

`judge(ids)` gives the number that the model would. Text is tokenised by its bytes, with a first
token more where special tokens are added.
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
        rows = [self.tokens(each, body) for each in self.prompts(body["input"])]
        data = [self.entry(index, ids, body) for index, ids in enumerate(rows)]
        used = sum(map(len, rows))
        usage = {"prompt_tokens": used, "total_tokens": used, "completion_tokens": 0, "prompt_tokens_details": None}
        return 200, {"id": "classify-1", "object": "list", "created": 1, "model": self.model, "data": data, "usage": usage}

    def prompts(self, given):
        if given == []:
            raise Refused(400, "You must pass at least one prompt")
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given

    def tokens(self, each, body):
        if isinstance(each, str):
            ids = [byte + BYTE_OFFSET for byte in each.encode()]
            each = [FIRST, *ids] if body.get("add_special_tokens", True) else ids
        if not each:
            raise Refused(400, "The decoder prompt cannot be empty")
        if max(each) >= self.vocabulary:
            raise Refused(400, f"Token id {max(each)} is out of vocabulary")
        if len(each) > self.max_model_len:
            raise Refused(400, f"This model's maximum context length is {self.max_model_len} tokens.", param="input_tokens")
        return each

    def entry(self, index, ids, body):
        given = self.judge(ids)
        numbers = given if isinstance(given, list) else [given]
        if body.get("use_activation", True):  # unknown fields are ignored, so a misspelt one comes here
            numbers = [1 / (1 + math.exp(-number)) for number in numbers]
        return {"index": index, "label": "LABEL_0", "probs": numbers, "num_classes": len(numbers)}
