"""Sampling on a CPU: tokens per second of `LocalChatClient`, `generate` of transformers, TRL and
vLLM, on one model and the same prompts.

    python -m benches.python.sampling_speed --trl-python .venv-trl/bin/python \\
        --vllm-python .venv-vllm/bin/python

The model is a Qwen2 of 100 million parameters with random weights and a vocabulary of 32,000, in
float32. Each of 32 prompts of 200 to 256 tokens gets 8 answers of at most 128 tokens at temperature
1. One in 64 tokens of the vocabulary ends an answer, so answers are ragged: about 55 tokens in the
mean. Each contender samples in a process of its own, first for one prompt, then for all, which is
measured. Tokens are those of the answers, up to the end token. Memory is the growth of the
process's peak. Beside other work trust the ratio of processor time, with `--threads 1`.

Only `LocalChatClient` and vLLM return the log-probabilities of the answers; `generate` and TRL's
path do not. TRL (`pip install trl==1.16.0 -c constraints.txt`) and vLLM (`make vllm`) need
environments of their own, and are left out without them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benches.python.random_models import END_IDS, load_large_model, plain_ids, save_large_model
from benches.python.trl_grpo import grpo_config

PROMPTS, GROUP, LEAST_PROMPT, MOST_PROMPT, ANSWER = 32, 8, 200, 256, 128
Contender = Callable[[Path, list[list[int]], dict[str, Any]], Callable[[list[list[int]], int], int]]
"""From the model's folder, prompts and options to a function that samples with a seed and returns
the number of tokens."""


def draw_prompts(options: dict[str, Any]) -> list[list[int]]:
    """The prompts, each `group` times in a row."""
    random, words = Random(0), plain_ids()
    prompts = [random.choices(words, k=random.randint(LEAST_PROMPT, MOST_PROMPT)) for _ in range(options["prompts"])]
    return [prompt for prompt in prompts for _ in range(options["group"])]


def with_ludic(folder: Path, prompts: list[list[int]], options: dict[str, Any]) -> Callable[[list[list[int]], int], int]:
    import asyncio

    from ludic.inference import LocalChatClient, SamplingParams

    model, tokenizer = load_large_model(folder)
    client = LocalChatClient(model, tokenizer, max_batch_size=len(prompts))
    sampling = SamplingParams(temperature=1.0, top_p=options["top_p"], max_tokens=ANSWER)

    async def sample(prompts: list[list[int]], seed: int) -> int:
        traces = await asyncio.gather(
            *[client.complete_tokens(p, sampling=sampling, seed=1000 * seed + i) for i, p in enumerate(prompts)]
        )
        return sum(len(trace.completion_token_ids) for trace in traces)

    return lambda prompts, seed: asyncio.run(sample(prompts, seed))


def with_generate(folder: Path, prompts: list[list[int]], options: dict[str, Any]) -> Callable[[list[list[int]], int], int]:
    import torch

    model, _ = load_large_model(folder)

    def sample(prompts: list[list[int]], seed: int) -> int:
        torch.manual_seed(seed)
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.no_grad():
            whole = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=options["top_p"],
                max_new_tokens=ANSWER,
            )
        return count_tokens(whole[:, width:].tolist())

    return sample


def with_trl(folder: Path, prompts: list[list[int]], options: dict[str, Any]) -> Callable[[list[list[int]], int], int]:
    """What `GRPOTrainer` does to sample with transformers."""
    import torch
    from datasets import Dataset  # type: ignore[import-untyped, unused-ignore]
    from trl import GRPOTrainer  # type: ignore[import-not-found, unused-ignore]

    model, tokenizer = load_large_model(folder)
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    config = grpo_config(
        folder,
        group=options["group"],
        answer=ANSWER,
        per_device_train_batch_size=len(prompts),
        top_k=0,
        top_p=options["top_p"],
        generation_kwargs={"eos_token_id": END_IDS},
    )
    data = Dataset.from_list([{"prompt": text} for text in dict.fromkeys(texts)])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
    )

    def sample(prompts: list[list[int]], seed: int) -> int:
        torch.manual_seed(seed)
        return count_tokens(trainer._generate([tokenizer.decode(prompt) for prompt in prompts])[1])

    return sample


def with_vllm(folder: Path, prompts: list[list[int]], options: dict[str, Any]) -> Callable[[list[list[int]], int], int]:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    engine = LLM(
        model=str(folder),
        tokenizer=str(folder / "tokenizer"),
        dtype="float32",
        max_model_len=MOST_PROMPT + ANSWER,
        max_num_seqs=len(prompts),
        enforce_eager=True,
    )

    def sample(prompts: list[list[int]], seed: int) -> int:
        settings = [
            SamplingParams(
                temperature=1.0,
                top_p=options["top_p"],
                max_tokens=ANSWER,
                logprobs=0,
                stop_token_ids=END_IDS,
                detokenize=False,
            )
            for _ in prompts
        ]  # without seeds: on a CPU it refuses those of requests (0.32)
        engine.reset_prefix_cache()  # prompts are shared within a batch, not with the batch before
        outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], settings, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return sample


CONTENDERS: dict[str, tuple[str, Contender]] = {
    "ludic": ("`LocalChatClient`", with_ludic),
    "generate": ("transformers `generate`", with_generate),
    "trl": ("TRL's `GRPOTrainer`", with_trl),
    "vllm": ("vLLM", with_vllm),
}


def count_tokens(rows: Sequence[Sequence[int]]) -> int:
    """Tokens up to the first end token: rows [7, end, pad, pad] and [7, 8, 9, 10] have 2 + 4."""
    ends = set(END_IDS)
    return sum(next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in rows)


def measure(name: str, folder: Path, options: dict[str, Any]) -> dict[str, float]:
    """Sample for one prompt, and then for all, which is measured."""
    prompts = draw_prompts(options)
    sample = CONTENDERS[name][1](folder, prompts, options)
    sample(prompts[: options["group"]], 1)
    before, start, begin = read_status("VmRSS"), time.perf_counter(), time.process_time()
    tokens = sample(prompts, 2)
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - begin
    return {
        "tokens": tokens,
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "bytes": read_status("VmHWM") - before,
    }


def read_status(key: str) -> int:
    """Bytes of memory of this process: `VmRSS` in use, `VmHWM` the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{key}:")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, help="interpreter of an environment with TRL")
    parser.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vLLM")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--group", type=int, default=GROUP, help="answers to each prompt")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--measure", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    options = {"prompts": args.prompts, "group": args.group, "top_p": args.top_p}
    if args.measure is not None:
        result = measure(args.measure, args.folder, options)
        (args.folder / f"{args.measure}.json").write_text(json.dumps(result))
        return
    pythons = {"ludic": Path(sys.executable), "generate": Path(sys.executable), "trl": args.trl_python, "vllm": args.vllm_python}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        save_large_model(Path(folder))
        for name in args.only:
            if pythons[name] is not None:
                results[name] = run_contender(name, pythons[name], Path(folder), args)
    print(format_table(results, options))


def run_contender(name: str, python: Path, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Measure one contender in a process of its own, with its interpreter."""
    words = [f"--{key}={getattr(args, key.replace('-', '_'))}" for key in ("prompts", "group", "top-p")]
    threads = str(args.threads)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    command = [python, "-m", "benches.python.sampling_speed", "--measure", name, "--folder", folder, *words]
    subprocess.run([str(word) for word in command], check=True, env=environment, stdout=sys.stderr)
    result: dict[str, float] = json.loads((folder / f"{name}.json").read_text())
    return result


def format_table(results: dict[str, dict[str, float]], options: dict[str, Any]) -> str:
    """Speeds are relative to `generate`, or to the first if it was not measured."""
    reference = results.get("generate", next(iter(results.values())))
    lines = [
        f"### Sampling {options['group']} answers to each of {options['prompts']} prompts, top-p {options['top_p']:g}",
        "",
        "| | tokens | seconds | tokens per second | speed | in processor time | peak memory, GB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        speeds = [
            (result["tokens"] / result[key]) / (reference["tokens"] / reference[key]) for key in ("seconds", "processor_seconds")
        ]
        lines.append(
            f"| {CONTENDERS[name][0]} | {result['tokens']} | {result['seconds']:.1f} | {result['tokens'] / result['seconds']:.0f} | "
            f"{speeds[0]:.2f}x | {speeds[1]:.2f}x | {result['bytes'] / 1e9:.2f} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
