"""How much smaller and faster pushes of what changed are: `python -m benches.python.delta_pushes`.

For each learning rate, GRPO trains a small new model in float32 for 100 steps, with a reward that
differs within each group, so that each step has a gradient. After each step the weights are pushed
in bfloat16, over gloo on loopback, to two stub servers with the receiver of real ones: one is sent
what changed, the other all weights. Both must have the trainer's bits after each push. Reported are
the share of the entries that changed, the bytes, and the median seconds of a push by each way.

    python -m benches.python.delta_pushes --lr 1e-6 --hidden-size 512

The stub (tests/support) speaks the protocol of vLLM 0.32. It copies weights where vLLM loads them
into its model, so the seconds are of comparing, sending and receiving.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import torch
from safetensors.torch import save_file
from stub_weight_server import StubWeightServer, same
from tiny_policy import make_tiny_policy, tiny_tokenizer
from transformers import AutoModelForCausalLM

from ludic import GRPO
from ludic.distributed import create_vllm_publisher
from ludic.training.callbacks import Callback

ROWS = [{"prompt": str(number)} for number in range(40)]
SMALL = {
    "threads": 1,
    "rollout.prompts": 2,
    "rollout.group_size": 4,
    "task.args.max_new_tokens": 16,
    "evaluation.prompts": 2,
    "evaluation.samples_per_prompt": 1,
}


def count_kinds(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """The number of different characters, which a random model's answers differ in."""
    return [float(len(set(str(completion)))) for completion in completions]


class AfterEachStep(Callback):
    """Calls `push` with the step and the weights."""

    def __init__(self, push: Callable[[int, dict[str, torch.Tensor]], None]) -> None:
        self.push, self.error = push, None

    def on_step(self, event: Any) -> None:
        try:
            self.push(event.step, {name: weight.detach() for name, weight in event.trainer.model.named_parameters()})
        except BaseException as error:  # a callback that raises would only be logged
            self.error = error
            event.stop("a push failed")


def save_model(folder: Path, hidden_size: int, layers: int) -> None:
    """Save a Qwen2 with new weights, of the usual standard deviation of 0.02."""
    config = make_tiny_policy().config
    config.update({"hidden_size": hidden_size, "num_hidden_layers": layers, "intermediate_size": 4 * hidden_size})
    config.update(
        {"num_attention_heads": hidden_size // 32, "initializer_range": 0.02, "layer_types": ["full_attention"] * layers}
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def train(
    lr: float, steps: int, push: Callable[[int, dict[str, torch.Tensor]], None], *, hidden_size: int, layers: int, **settings: Any
) -> None:
    """Train a small model for `steps` steps of GRPO, each followed by `push`."""
    callback = AfterEachStep(push)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        save_model(Path(folder, "model"), hidden_size, layers)
        given = {**SMALL, "steps": steps, "trainer.lr": lr, "trainer.lr_scheduler_type": "constant", "output": f"{folder}/runs"}
        given.update(settings)
        GRPO(f"{folder}/model", count_kinds, ROWS, callbacks=[callback], **given).train()
    if callback.error is not None:
        raise callback.error


def start_server(folder: Path, weights: dict[str, torch.Tensor]) -> StubWeightServer:
    """A server of a model with weights of these shapes in bfloat16. It has to be entered."""
    folder.mkdir(parents=True)
    save_file(
        {name: torch.zeros_like(weight, dtype=torch.bfloat16) for name, weight in weights.items()}, folder / "model.safetensors"
    )
    return StubWeightServer(folder, dtype="bfloat16")


class Comparison:
    """Pushes each version to both servers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.servers: list[StubWeightServer] = []
        self.rows: list[tuple[float, float, float, float]] = []
        """Of each push after the first that changed a bit: share of changed entries, share of
        bytes, and the seconds of the two ways."""

    def push(self, step: int, weights: dict[str, torch.Tensor]) -> None:
        if not self.servers:
            self.servers = [start_server(self.root / way, weights).__enter__() for way in ("auto", "whole")]
            ways = zip(("auto", "whole"), self.servers, strict=True)
            self.publishers = [create_vllm_publisher(server.url, push=way) for way, server in ways]
        before = {name: weight.clone() for name, weight in self.servers[1].served.items()}
        seconds = []
        for publisher in self.publishers:
            publisher.expect_change(False)  # a batch may have no signal
            began = time.perf_counter()
            publisher.publish(weights, version=step)
            seconds.append(time.perf_counter() - began)
        after, whole = (server.served for server in self.servers)
        assert same(after, whole), f"the two servers have other bits at step {step}"
        sent, all_bytes = (publisher.pushed_bytes for publisher in self.publishers)
        bits = {name: (before[name].view(torch.int16) != weight.view(torch.int16)) for name, weight in whole.items()}
        changed = sum(int(one.sum()) for one in bits.values()) / sum(one.numel() for one in bits.values())
        if step > 1 and changed:
            self.rows.append((changed, sent / all_bytes, *seconds))

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()
        for server in self.servers:
            server.__exit__()

    def report(self, lr: float) -> str:
        changed, share, delta_s, whole_s = zip(*self.rows, strict=True)
        times = f"{len(self.rows)} | {1e3 * median(delta_s):.1f} | {1e3 * median(whole_s):.1f} | {median(delta_s) / median(whole_s):.2f}"
        return f"| {lr:g} | {fmean(changed):.2%} | {fmean(share):.2%} | {max(share):.2%} | {times} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    print(
        "| lr | entries changed | bytes, mean | bytes, most | pushes | delta ms | whole ms | delta / whole |\n" + "|---" * 8 + "|"
    )
    for lr in options.lr:
        with tempfile.TemporaryDirectory() as folder:
            comparison = Comparison(Path(folder))
            train(lr, options.steps, comparison.push, hidden_size=options.hidden_size, layers=options.layers)
            comparison.close()
            print(comparison.report(lr), flush=True)


if __name__ == "__main__":
    main()
