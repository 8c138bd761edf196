"""A fake vLLM server that really samples: a process with the policy of a run, which it loads from a
folder, and again with each push of the trainer. Its arguments, and each call that puts it to sleep,
wakes it or loads weights, are lines of `CALLS`, if that names a file.

`fake_vllm.install(folder, cpu=False, script=policy_vllm.__file__)` is an interpreter that runs it.
What it samples depends only on the weights, the prompt and the seed, and each answer is computed
alone, so that a run with such servers is the same whichever of them answers. Every answer is a line
of `SAMPLED`, if that names a file: version, and the fingerprint of the weights that sampled it.
"""

import argparse
import copy
import json
import os
import sys
import threading
from pathlib import Path


def main():
    import torch
    from stub_policy_server import StubPolicyServer, ids_of

    from ludic.models.loading import load_model
    from ludic.models.lora import load_adapter

    parser = argparse.ArgumentParser()
    for name in ("--model", "--host", "--served-model-name"):
        parser.add_argument(name)
    parser.add_argument("--port", type=int)
    parser.add_argument("--weight-transfer-config", type=json.loads)
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)

    class Server(StubPolicyServer):
        def __init__(self):
            self.model, self.adapted = load_model(options.model, "float32").eval(), {}
            super().__init__(
                Path(options.model),
                tied=self.model.config.tie_word_embeddings,
                address=(options.host, options.port),
                **options.weight_transfer_config,
            )
            self.secret = os.environ["LUDIC_SERVER_SECRET"]

        def answer(self, path, query, body):
            if path in ("/sleep", "/wake_up", "/finish_weight_update"):
                note_call(path, query)
            return super().answer(path, query, body)

        def on_v1_models(self, *_):
            base = {"id": options.served_model_name, "max_model_len": 512}
            return {"data": [base, *({"id": name} for name in self.adapters)]}

        def find_model(self, name):
            """(version, weights, model) of the base or of an adapter."""
            weights = self._find_weights(name)
            if "@" not in name:
                return self.version, weights, self.model
            folder = self.adapters[name]
            if folder not in self.adapted:
                self.adapted[folder] = load_adapter(copy.deepcopy(self.model), folder).eval()
            return name.rpartition("@")[2], weights, self.adapted[folder]

        def on_finish_weight_update(self, *request):
            super().on_finish_weight_update(*request)
            self.model.load_state_dict(self.served, strict=False)

        def on_inference_v1_generate(self, _, body):
            params = body["sampling_params"]
            with self._life, torch.inference_mode():
                assert self._life.wait_for(lambda: self.paused is None, timeout=60)
                version, weights, model = self.find_model(body["model"])
                generator = torch.Generator().manual_seed(params["seed"] % 2**63)
                ids, logprobs = [], []
                while len(ids) < params["max_tokens"]:
                    row = model(torch.tensor([body["token_ids"] + ids])).logits[0, -1].log_softmax(-1)
                    ids.append(int(torch.multinomial(row.exp(), 1, generator=generator)))
                    logprobs.append(min(0.0, float(row[ids[-1]])))
                    if ids[-1] in (params.get("stop_token_ids") or ()):
                        break
            if os.environ.get("SAMPLED"):
                with open(os.environ["SAMPLED"], "a") as file:
                    file.write(f"{version} {ids_of(weights)}\n")
            choice = {
                "finish_reason": "length" if len(ids) == params["max_tokens"] else "stop",
                "stop_reason": None,
                "token_ids": ids,
                "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
                "logprobs": {"content": [{"token_id": i, "logprob": logprob} for i, logprob in zip(ids, logprobs, strict=True)]},
            }
            return {"choices": [choice], "prompt_token_ids": body["token_ids"]}

    note_call("start", sys.argv[1:])
    with Server():
        threading.Event().wait()


def note_call(path, details):
    if os.environ.get("CALLS"):
        with open(os.environ["CALLS"], "a") as file:
            file.write(json.dumps([path, details]) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
