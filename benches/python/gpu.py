"""Measurements on a GPU: log-probabilities without logits, prefix trees, a whole GRPO step, and a
run of the built-in task.

    python -m benches.python.gpu --out gpu.json
    python -m benches.python.gpu --only scores trees

Prints a table for each part and writes all numbers to `--out`. Times are medians over repeats after
a warm-up, between synchronisations; memory is the peak of torch's allocator beside what was there
before. `--small` shrinks every part, to try the program; `--device cpu` then runs it anywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benches.python.random_models import make_qwen2
from torch import Tensor

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Place:
    """Where and how large to measure."""

    device: str
    small: bool
    repeats: int

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def measure(self, run: Callable[[], Any], *, warm_up: int = 2) -> dict[str, float]:
        """Median seconds of a call, the share of the range of all calls in it, and peak GB beside
        what was allocated before."""
        for _ in range(warm_up):
            run()
        self.synchronize()
        before = self._reset()
        seconds = []
        for _ in range(self.repeats):
            begin = time.perf_counter()
            run()
            self.synchronize()
            seconds.append(time.perf_counter() - begin)
        median = statistics.median(seconds)
        peak = torch.cuda.max_memory_allocated() - before if self.device == "cuda" else 0
        return {"seconds": median, "spread": (max(seconds) - min(seconds)) / median, "peak_gb": peak / 1e9}

    def _reset(self) -> int:
        if self.device != "cuda":
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()


def measure_scores(place: Place) -> Rows:
    """Forward and backward passes of the sum of the log-probabilities of action tokens, from hidden
    states in bfloat16."""
    from benches.python.token_scores import with_logits, without_logits

    from ludic.training.loss import token_scores

    rows, tokens, width, vocabulary = (2, 64, 64, 1000) if place.small else (16, 1024, 1024, 151_936)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, tokens, width, generator=generator).to(place.device, torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) / width**0.5).to(place.device, torch.bfloat16)
    head = torch.nn.Parameter(weight)
    ids = torch.randint(0, vocabulary, (rows, tokens), generator=generator).to(place.device)
    mask = (torch.arange(tokens) >= tokens - tokens // 4).float().expand(rows, -1).contiguous().to(place.device)
    kept, default = token_scores.TILE_ELEMENTS, token_scores.GPU_TILE_ELEMENTS

    def run(way: Callable[..., Tensor], elements: int) -> float:
        token_scores.TILE_ELEMENTS = token_scores.GPU_TILE_ELEMENTS = elements
        hidden.grad = head.grad = None
        total = way(hidden, head, ids, mask)
        total.backward()
        return float(total)

    ways: list[tuple[str, Callable[..., Tensor], int]] = [
        ("all logits", with_logits, default),
        ("no logits, action tokens (`chunked`)", without_logits, default),
    ]
    ways += [(f"the same, tiles of 2^{power} logits", without_logits, 1 << power) for power in (22, 25, 26)]
    ways.append(("Liger's fused linear cross-entropy, action tokens", with_liger, default))
    found: Rows = []
    for name, way, elements in ways:
        row = attempt(name, lambda way=way, elements=elements: run(way, elements), place)
        if "peak_gb" in row:
            row["of_bf16_logits"] = row["peak_gb"] * 1e9 / (rows * tokens * vocabulary * 2)
            row["value"] = run(way, elements)
            row["norm"] = 0.0 if hidden.grad is None else float(hidden.grad.float().norm())
        found.append(row)
    token_scores.TILE_ELEMENTS, token_scores.GPU_TILE_ELEMENTS = kept, default
    return found


def with_liger(hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Its gradients are computed in the forward pass."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    scored = mask[:, 1:] > 0
    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    total: Tensor = -loss(weight, hidden[:, :-1][scored], ids[:, 1:][scored])
    return total


def attempt(name: str, run: Callable[[], Any], place: Place, **options: Any) -> dict[str, Any]:
    """A row of the table, which is printed at once; a failure is a row too."""
    begin = time.perf_counter()
    try:
        row = {"way": name, **place.measure(run, **options)}
    except Exception as error:
        traceback.print_exc(limit=-2)
        row = {"way": name, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    print(f"{row}; {time.perf_counter() - begin:.1f} s with the warm-up", flush=True)
    return row


def make_model(place: Place, attention: str = "sdpa") -> Any:
    """The shape of Qwen2.5-0.5B with random weights, in bfloat16."""
    from ludic.models.packed_attention import set_attention

    sizes = (1000, 64, 128, 2, 4, 2) if place.small else (151_936, 896, 4864, 24, 14, 2)
    vocabulary, width, inner, layers, heads, pairs = sizes
    shape = {"width": width, "inner": inner, "layers": layers, "heads": heads, "key_value_heads": pairs}
    with torch.device(place.device):
        model = make_qwen2(vocabulary, **shape, max_position_embeddings=8192, tie_word_embeddings=True).to(torch.bfloat16)
    set_attention(model, attention)
    return model


def draw_samples(prompt: int, answer: int, group: int, groups: int, vocabulary: int) -> list[Any]:
    """Groups that share a prompt; answers are of all lengths up to `answer`."""
    from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWItem

    draw, items = np.random.default_rng(0), []
    for _ in range(groups):
        prompt_ids = draw.integers(0, vocabulary, prompt)
        for _ in range(group):
            length = int(draw.integers(answer // 4, answer + 1))
            ids = np.concatenate([prompt_ids, draw.integers(0, vocabulary, length)]).astype(np.int32)
            actions = np.concatenate([np.zeros(prompt, np.uint8), np.ones(length, np.uint8)])
            logps = SampleAttachments(ActorTokenLogps(np.full(length, -11.5, np.float32)))
            items.append(SAWItem(ids, np.ones_like(actions), actions, float(draw.normal()), attachments=logps))
    return items


TREE_WAYS = [
    ("rows of their own, padded, sdpa", "optimal", "off", "sdpa"),
    ("rows of their own, padding-free", "padding_free", "off", "ludic_packed"),
    ("prefix trees, sdpa", "optimal", "tree", "ludic_packed"),
    ("prefix trees, FlexAttention", "optimal", "tree", "ludic_packed_flex"),
]


def measure_trees(place: Place) -> Rows:
    """A GRPO step: forward, backward and AdamW over groups that share a prompt."""
    shapes = [(32, 16, 4, 2)] if place.small else [(512, 128, 8, 16), (2048, 512, 8, 8), (1024, 1024, 16, 4)]
    found: Rows = []
    for prompt, answer, group, groups in shapes:
        model = make_model(place)
        items = draw_samples(prompt, answer, group, groups, model.config.vocab_size)
        for name, packing, sharing, attention in TREE_WAYS:
            row = _measure_tree(place, model, items, name, packing, sharing, attention, prompt + answer)
            found.append({"shape": f"{prompt} + {answer // 4}..{answer}, {groups} x {group}", **row})
        del model
    return found


def _measure_tree(
    place: Place, model: Any, items: list[Any], name: str, packing: str, sharing: str, attention: str, longest: int
) -> dict[str, Any]:
    from ludic.models.packed_attention import set_attention
    from ludic.training.algorithm import RLAlgorithm
    from ludic.training.backend.torch import TorchBackend
    from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
    from ludic.training.batching.tree_batches import TreeMiniBatch
    from ludic.training.config import TrainerConfig
    from ludic.training.credit_assignment import ConstantCredit
    from ludic.training.loss import TokenClippedSurrogateLoss

    settings: Any = {"packing": packing, "prefix_sharing": sharing, "logits": "chunked"}
    budget = max(longest, 512 if place.small else 16_384)
    cfg = TrainerConfig(model_device=place.device, max_seq_len=longest, micro_token_budget=budget, lr=0.0, **settings)
    set_attention(model, attention)
    backend = TorchBackend(model, cfg, algo=RLAlgorithm("grpo", ConstantCredit(1.0), TokenClippedSurrogateLoss()))
    facts: dict[str, float] = {}

    def step() -> None:
        macro = MacroBatch.ingest(items, longest)
        kind = TreeMiniBatch if sharing == "tree" else MiniBatch
        mini_batch = kind(macro, np.arange(len(macro.items)), cfg)
        backend.forward_backward(mini_batch, totals=mini_batch.totals).wait()
        result = backend.optim_step().wait()
        facts["tokens"], facts["micro_batches"] = float(mini_batch.padding()["perf/padded_tokens"]), len(mini_batch)
        facts["norm"] = float(result["grad_norm"])

    begin = time.perf_counter()
    if step is not None and place.device != "cuda" and attention == "ludic_packed_flex":
        return {"way": name, "error": "torch has no gradient of FlexAttention on a CPU"}
    row = attempt(name, step, place)
    row["with_warm_up_s"] = time.perf_counter() - begin
    return {**row, **facts}


def measure_step(place: Place) -> Rows:
    """Sampling of 8 groups of 8 with `LocalChatClient` and `generate`, and the training step on
    what was sampled."""
    from benches.python.sampling_speed import draw_prompts

    model = make_model(place).eval()
    options = {"prompts": 2, "group": 2} if place.small else {"prompts": 8, "group": 8}
    prompts = [[token % model.config.vocab_size for token in prompt] for prompt in draw_prompts(options)]
    ends = list(range(3, model.config.vocab_size, 63))  # none of them is in a prompt
    found: Rows = []
    traces: list[Any] = []
    for name, way in (("`LocalChatClient`", sample_with_client), ("`generate` of transformers", sample_with_generate)):
        sampled: list[Any] = []

        def run(way: Any = way, sampled: list[Any] = sampled) -> None:
            sampled[:] = way(place, model, prompts, ends)

        row = attempt(name, run, place, warm_up=1)
        if "seconds" in row:
            row["tokens"] = sum(len(answer) for answer, _ in sampled)
            row["tokens_per_second"] = row["tokens"] / row["seconds"]
        traces = traces or list(sampled)
        found.append(row)
    if traces and traces[0][1] is not None:
        found += _measure_training(place, model, prompts, traces)
    return found


def _measure_training(place: Place, model: Any, prompts: Sequence[Sequence[int]], traces: Sequence[Any]) -> Rows:
    """The training step on sampled answers."""
    from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWItem

    draw, items = np.random.default_rng(0), []
    for prompt, (answer, logps) in zip(prompts, traces, strict=True):
        ids = np.array([*prompt, *answer], dtype=np.int32)
        actions = np.concatenate([np.zeros(len(prompt), np.uint8), np.ones(len(answer), np.uint8)])
        attached = SampleAttachments(ActorTokenLogps(np.array(logps, dtype=np.float32)))
        items.append(SAWItem(ids, np.ones_like(actions), actions, float(draw.normal()), attachments=attached))
    longest = max(len(item.input_ids) for item in items)
    return [
        _measure_tree(place, model, items, f"training: {name}", packing, sharing, attention, longest)
        for name, packing, sharing, attention in TREE_WAYS
    ]


def sample_with_client(place: Place, model: Any, prompts: Sequence[Sequence[int]], ends: Sequence[int]) -> list[Any]:
    """(answer, its log-probabilities) of each prompt."""
    from ludic.inference import LocalChatClient, SamplingParams
    from ludic.models.byte_tokenizer import make_byte_tokenizer

    model.generation_config.eos_token_id = list(ends)
    client = LocalChatClient(model, make_byte_tokenizer(), max_batch_size=len(prompts))
    sampling = SamplingParams(temperature=1.0, max_tokens=8 if place.small else 128)

    async def sample() -> list[Any]:
        return await asyncio.gather(*[client.complete_tokens(p, sampling=sampling, seed=i) for i, p in enumerate(prompts)])

    return [(list(trace.completion_token_ids), list(trace.completion_logprobs or ())) for trace in asyncio.run(sample())]


def sample_with_generate(place: Place, model: Any, prompts: Sequence[Sequence[int]], ends: Sequence[int]) -> list[Any]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=place.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=place.device)
    with torch.no_grad():
        whole = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=8 if place.small else 128,
            eos_token_id=list(ends),
            pad_token_id=0,
        )
    found = []
    for row in whole[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in set(ends)), len(row))
        found.append((row[:end], None))
    return found


def measure_task(place: Place) -> Rows:
    """`ludic train sort` in a process of its own, on the device and on the CPU."""
    found: Rows = []
    devices = dict.fromkeys((place.device, "cpu"))
    for device in devices:
        with tempfile.TemporaryDirectory() as folder:
            words = ["train", "sort", f"trainer.model_device={device}", f"output={folder}", "name=run"]
            words += ["steps=3", "warmup.steps=3"] if place.small else []
            program = "from ludic.cli.app import main; main()"
            begin = time.perf_counter()
            try:
                done = subprocess.run(
                    [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=200, env={**os.environ}
                )
                lines = (done.stdout + done.stderr).strip().splitlines()
                row = {
                    "seconds": time.perf_counter() - begin,
                    "status": done.returncode,
                    "last": lines[-1][:160] if lines else "",
                }
                if done.returncode:
                    print("\n".join(lines[-20:]), file=sys.stderr)
            except subprocess.TimeoutExpired:
                row = {"error": "longer than 200 s"}
        found.append({"way": f"`ludic train sort trainer.model_device={device}`", **row})
    return found


PARTS: dict[str, tuple[str, Callable[[Place], Rows]]] = {
    "scores": ("Log-probabilities of 16,384 tokens, a quarter actions, vocabulary 151,936, bfloat16", measure_scores),
    "trees": ("A GRPO step of a Qwen2 of 0.5 billion parameters in bfloat16", measure_trees),
    "step": ("Sampling 64 answers, and the training step on them", measure_step),
    "task": ("The built-in task", measure_task),
}


def format_rows(title: str, rows: Rows) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"### {title}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(_format(row.get(key, '')) for key in columns)} |" for row in rows]
    return "\n".join([*lines, ""])


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def describe(place: Place) -> str:
    import transformers

    name = torch.cuda.get_device_name() if place.device == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, Python {sys.version.split()[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="sizes for a trial")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    args = parser.parse_args()
    place = Place(args.device, args.small, args.repeats)
    found: dict[str, Any] = {"machine": describe(place)}
    print(found["machine"], "\n", flush=True)
    for name in args.only:
        title, measure = PARTS[name]
        begin = time.perf_counter()
        try:
            found[name] = measure(place)
        except Exception as error:
            traceback.print_exc()
            found[name] = [{"error": f"{type(error).__name__}: {error}"}]
        print(format_rows(title, found[name]), f"({time.perf_counter() - begin:.0f} s)\n", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
