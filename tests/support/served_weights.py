"""Compare the log-probabilities of a real server with those of a model in this process."""

import copy

import httpx2
import torch

from ludic.inference.vllm.endpoints import VllmEndpoints

PROMPT = list(range(10, 40))
CLOSE = 1e-4
CHANGED = 0.1


def perturb(model, seed, scale=0.1):
    """The model after a perturbation too large to overlook."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return other


def weights(model):
    return dict(model.named_parameters())


def generate(server, max_tokens=32, prompt=PROMPT, model="tiny"):
    """Sampled ids, their log-probabilities as the server reports them, and the spans of weight
    versions."""
    params = {"max_tokens": max_tokens, "temperature": 1.0, "logprobs": 0, "seed": 1, "ignore_eos": True}
    body = {"model": model, "token_ids": prompt, "sampling_params": params}
    answer = httpx2.post(f"{server.url}/inference/v1/generate", json=body, timeout=120)
    answer.raise_for_status()
    (choice,) = answer.json()["choices"]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]], choice["weight_versions"]


def logprob_differences(model, ids, logprobs, prompt=PROMPT):
    """[C] absolute differences between the reported log-probabilities and those of the local
    model."""
    with torch.no_grad():
        logps = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return (logps.gather(-1, torch.tensor(ids)[:, None])[:, 0] - torch.tensor(logprobs)).abs()


def max_difference(model, server, /, **options):
    ids, logprobs, _ = generate(server, **options)
    return logprob_differences(model, ids, logprobs, options.get("prompt", PROMPT)).max().item()


def served_version(server):
    return VllmEndpoints(server.url).weight_version()


def running_requests(server):
    """Number of requests that the engine is sampling."""
    metrics = httpx2.get(f"{server.url}/metrics", timeout=60).text
    lines = (line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running{"))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
