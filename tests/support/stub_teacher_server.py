"""A vLLM server that scores prompts, on loopback in this process: `prompt_logprobs` as vLLM 0.32
returns them, and `/detokenize`."""

from faulty_server import Refused
from stub_vllm import StubVLLM


class StubTeacherServer(StubVLLM):
    def __init__(self, judge, tokenizer, **settings):
        """`judge(ids)`: [T - 1] log-probabilities of a row's tokens but the first."""
        super().__init__(**settings)
        self.judge, self.tokenizer = judge, tokenizer

    def answer(self, method, path, query, body):
        if path == "/detokenize":
            return 200, {"prompt": self.tokenizer.decode(body["tokens"])}
        if path == "/v1/completions" and "prompt_logprobs" in body:
            return 200, {"choices": [self.choice(index, ids) for index, ids in enumerate(body["prompt"])]}
        return super().answer(method, path, query, body)

    def choice(self, index, ids):
        if len(ids) >= self.max_model_len:
            raise Refused(400, f"This model's maximum context length is {self.max_model_len} tokens.", param="input_tokens")
        entries = [{str(token): {"logprob": logp, "rank": 1}} for token, logp in zip(ids[1:], self.judge(ids), strict=True)]
        return {"index": index, "text": "", "prompt_logprobs": [None, *entries]}
