"""Three updates of GRPO on one batch with images, by ludic and by TRL's GRPOTrainer, from the same
weights of a small Qwen2-VL: the weights after them, and what they cost.

    python -m benches.python.compare_trl_images --trl-python .venv-trl/bin/python

TRL is not a dependency: it needs an environment of its own (`pip install trl==1.16.0 torchvision -c
constraints.txt`). Both sides get the same answers and rewards, and nothing is sampled. Each runs on
one thread in a process of its own. Seconds and memory are of the training call: TRL's has the
processing of the images and the log-probabilities of the old weights, ludic's has the former.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.python.trl_grpo import grpo_config

ROOT = Path(__file__).parents[2]
UPDATES, GROUP, RATE, SEED = 3, 8, 1e-3, 0
QUESTION = "how many, which colour? "


@dataclass(frozen=True)
class Size:
    prompts: int
    side: int
    """Pixels of the side of a picture."""
    tower: int
    """Layers of the vision tower."""
    rows: int
    """Rows of a micro-batch of TRL."""


SIZES = {"parity": Size(4, 24, 1, 8), "cost": Size(8, 96, 4, 16)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=".venv-trl/bin/python", help="interpreter of an environment with TRL")
    parser.add_argument("--size", choices=SIZES, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=("ludic", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        train = {"ludic": train_ludic, "trl": train_trl}[args.side]
        (args.work / f"{args.side}.json").write_text(json.dumps(train(args.work, SIZES[args.size])))
        return
    print("| batch | | seconds of processor | growth of memory, MB | largest difference of a weight | largest update |")
    print("|---|---|---|---|---|---|")
    for name in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            compare(Path(folder), name, args.trl_python)


def compare(work: Path, name: str, trl_python: str) -> None:
    """Print a row for each side."""
    prepare(work, SIZES[name])
    for side in ("ludic", "trl"):
        python = sys.executable if side == "ludic" else trl_python
        command = [python, "-m", "benches.python.compare_trl_images", "--side", side, "--work", str(work), "--size", name]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    start, ours, theirs = (load_weights(work / folder) for folder in ("model", "ludic", "trl"))
    far = max(float((ours[name] - theirs[name]).abs().max()) for name in start)
    moved = max(float((theirs[name] - start[name]).abs().max()) for name in start)
    for side in ("ludic", "trl"):
        cost = json.loads((work / f"{side}.json").read_text())
        print(f"| {name} | {side} | {cost['cpu_s']:.2f} | {cost['growth_mb']:.0f} | {far:.1e} | {moved:.1e} |", flush=True)


def load_weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def prepare(work: Path, size: Size) -> None:
    """Write the model, the pictures, and the answers: their rewards, token ids and
    log-probabilities."""
    import numpy as np
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText

    from ludic.models.images import small
    from ludic.models.images.processor import attach_processor, require_processor
    from ludic.models.saving import save_policy

    torch.manual_seed(SEED)
    tokenizer = small.make_image_tokenizer()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = small.make_small_image_config(tokenizer, vocab_size=len(tokenizer), **shape, **heads)
    config.vision_config.depth = size.tower
    model = small.draw_image_model(AutoModelForImageTextToText.from_config(config))
    attach_processor(model, small.make_small_processor(tokenizer, config))
    save_policy(model, tokenizer, work / "model")
    processor, draw, answers = require_processor(model).processor, np.random.default_rng(SEED), []
    for prompt in range(size.prompts):
        picture = Image.fromarray(draw.integers(0, 256, (size.side, size.side, 3), dtype=np.uint8))
        picture.save(work / f"{prompt}.png")
        read = processor(text=[f"<|vision_start|><|image_pad|><|vision_end|>{QUESTION}"], images=[[picture]], return_tensors="pt")
        for _ in range(GROUP):
            ids = [*draw.integers(3, 250, int(draw.integers(2, 8))).tolist(), tokenizer.eos_token_id]
            longer = torch.cat([read["input_ids"], torch.tensor([ids])], dim=1)
            types = torch.nn.functional.pad(read["mm_token_type_ids"], (0, len(ids)))
            pixels = {name: read[name] for name in ("pixel_values", "image_grid_thw")}
            with torch.no_grad():
                logits = model(input_ids=longer, mm_token_type_ids=types, **pixels).logits[0, -len(ids) - 1 : -1]
            logps = logits.log_softmax(dim=-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1).tolist()
            answers.append({"prompt": prompt, "ids": ids, "logps": logps, "reward": float(draw.random())})
    (work / "answers.json").write_text(json.dumps(answers))


def measure(train: Callable[[], None]) -> dict[str, float]:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    train()
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"cpu_s": time.process_time() - start, "growth_mb": growth / 1024}


def train_ludic(work: Path, size: Size) -> dict[str, float]:
    """Train with ludic, and write the model."""
    import torch

    from ludic.images.content import intern_prompt
    from ludic.images.store import current_store
    from ludic.inference.prompts.encoder import PromptEncoder
    from ludic.inference.prompts.template import Dialogue
    from ludic.models.images.processor import require_processor
    from ludic.models.loading import load_model, load_tokenizer
    from ludic.models.saving import save_policy
    from ludic.training import RLAlgorithm, SAWBatch, SAWItem, Trainer, TrainerConfig
    from ludic.training.batching.source import BatchSourceBase
    from ludic.training.credit_assignment import ConstantCredit
    from ludic.training.loss import TokenClippedSurrogateLoss
    from ludic.training.types import ActorTokenLogps, SampleAttachments

    torch.set_num_threads(1)
    model, tokenizer = load_model(str(work / "model"), "float32"), load_tokenizer(str(work / "model"))
    answers = json.loads((work / "answers.json").read_text())
    means = [sum(a["reward"] for a in answers if a["prompt"] == p) / GROUP for p in range(size.prompts)]

    class Same(BatchSourceBase):
        """The same batch in each step."""

        async def next_batch(self) -> SAWBatch:
            return batch

    def train() -> None:
        nonlocal batch
        encoder, items = PromptEncoder(tokenizer, require_processor(model)), []
        for answer in answers:
            messages = intern_prompt(QUESTION, current_store(), images=[work / f"{answer['prompt']}.png"])
            prompt = encoder.encode(Dialogue(messages))
            ids, masked = [*prompt.ids, *answer["ids"]], [0] * len(prompt.ids) + [1] * len(answer["ids"])
            weight = answer["reward"] - means[answer["prompt"]]
            given = SampleAttachments(ActorTokenLogps(answer["logps"]))
            items.append(SAWItem(ids, [1] * len(ids), masked, weight, {}, given, tuple(prompt.images)))
        settings = {"max_seq_len": 512, "micro_token_budget": 4096, "lr": RATE, "weight_decay": 0.0, "betas": (0.9, 0.99)}
        cfg = TrainerConfig(model_device="cpu", **settings)
        batch = SAWBatch(items, {"target_rollouts": len(items)})
        loss = TokenClippedSurrogateLoss(clip_eps_low=0.2, clip_eps_high=0.28, normalizer="tokens")
        algo = RLAlgorithm("grpo", ConstantCredit(1.0), loss)
        Trainer(model=model, algo=algo, batch_source=Same(), cfg=cfg).train_sync(UPDATES)

    batch: Any = None
    cost = measure(train)
    save_policy(model, tokenizer, work / "ludic")
    return cost


def train_trl(work: Path, size: Size) -> dict[str, float]:
    """Train with TRL, and write the model. Imports only TRL."""
    import torch
    from datasets import Dataset  # type: ignore[import-not-found, unused-ignore]
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import GRPOTrainer  # type: ignore[import-not-found, unused-ignore]

    torch.set_num_threads(1)
    answers = json.loads((work / "answers.json").read_text())
    ids = [answer["ids"] for answer in answers]

    class Given(GRPOTrainer):
        """With the given answers in place of sampled ones."""

        def _generate_single_turn(self, *args: Any, **settings: Any) -> Any:
            return ids, None

    rows = [
        {"prompt": [{"role": "user", "content": QUESTION}], "image": Image.open(work / f"{prompt}.png"), "number": prompt}
        for prompt in range(size.prompts)
    ]
    batch = size.prompts * GROUP
    args = grpo_config(
        work,
        group=GROUP,
        answer=16,
        per_device_train_batch_size=size.rows,
        gradient_accumulation_steps=batch // size.rows,
        num_iterations=UPDATES,
        max_steps=UPDATES,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        scale_rewards="none",
        use_liger_kernel=False,
    )
    model = AutoModelForImageTextToText.from_pretrained(work / "model", dtype=torch.float32, attn_implementation="sdpa")
    trainer = Given(
        model=model,
        processing_class=AutoProcessor.from_pretrained(work / "model"),
        reward_funcs=lambda completions, **_: [answer["reward"] for answer in answers],
        args=args,
        train_dataset=Dataset.from_list(rows),
    )
    cost = measure(trainer.train)
    trainer.model.save_pretrained(work / "trl")
    return cost


if __name__ == "__main__":
    main()
