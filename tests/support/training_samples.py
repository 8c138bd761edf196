"""Samples, batch sources and a model for training tests: byte-tokenizer ids and a Qwen2 of 10,000
parameters."""

import random
from dataclasses import replace

import torch

from ludic.models.byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from ludic.training import ActorTokenLogps, SampleAttachments, SAWBatch, SAWItem, TrainerConfig

TOKENIZER = make_byte_tokenizer()


def tiny_model(seed=0, **changes):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,  # large enough that a wrong shift or mask shows
    }
    return Qwen2ForCausalLM(Qwen2Config(**{**settings, **changes}))


def sorting_item(index, draw, *, group_size=4, weight=None):
    """The prompt `529140>`, an answer that may be wrong, and behaviour log-probabilities."""
    digits = "".join(draw.choice("0123456789") for _ in range(draw.randint(1, 9)))
    answer = "".join(sorted(digits, reverse=draw.random() < 0.5))[: draw.randint(1, 9)]
    prompt_ids = TOKENIZER.encode(f"{digits}>")
    completion_ids = [*TOKENIZER.encode(answer), TOKENIZER.eos_token_id]
    return SAWItem(
        input_ids=prompt_ids + completion_ids,
        attention_mask=[1] * (len(prompt_ids) + len(completion_ids)),
        action_mask=[0] * len(prompt_ids) + [1] * len(completion_ids),
        weight=draw.choice([-1.0, -0.5, 0.0, 0.0, 0.5, 1.5]) if weight is None else weight,
        meta={
            "rollout_id": f"r{index}",
            "step_index": 0,
            "total_reward": float(answer == "".join(sorted(digits))),
            "completion_length": len(completion_ids),
            "prompt_length": len(prompt_ids),
            "request_meta": {"group_id": index // group_size},
        },
        attachments=SampleAttachments(ActorTokenLogps([-0.2 - 5 * draw.random() for _ in completion_ids])),
    )


def sorting_items(count, seed=0, **options):
    draw = random.Random(seed)
    return [sorting_item(index, draw, **options) for index in range(count)]


def dialogue(index, draw, turns):
    """The samples of an episode, one per turn. Each prompt is the whole history plus a new
    question."""
    history, items = [], []
    for step in range(turns):
        turn = sorting_item(index, draw)
        item = replace(
            turn,
            input_ids=history + turn.input_ids,
            attention_mask=[1] * len(history) + turn.attention_mask,
            action_mask=[0] * len(history) + turn.action_mask,
            meta={**turn.meta, "step_index": step, "prompt_length": len(history) + turn.meta["prompt_length"]},
        )
        items.append(item)
        history = item.input_ids
    return items


def dialogues(turns, seed=0):
    """One episode per entry of `turns`, with that many turns."""
    draw = random.Random(seed)
    return [item for index, count in enumerate(turns) for item in dialogue(index, draw, count)]


def branching_item(index, draw, prompt, *, group):
    """One of few answers to `prompt`, with its own behaviour log-probabilities and weight."""
    answer = [draw.randint(1, 2) for _ in range(draw.randint(1, 12))]
    return SAWItem(
        input_ids=prompt + answer,
        attention_mask=[1] * (len(prompt) + len(answer)),
        action_mask=[0] * len(prompt) + [1] * len(answer),
        weight=draw.choice([-1.0, 0.0, 0.5, 1.5]),
        meta={"rollout_id": f"b{index}", "step_index": 0, "request_meta": {"group_id": group}},
        attachments=SampleAttachments(ActorTokenLogps([-0.2 - 5 * draw.random() for _ in answer])),
    )


def branching_items(groups, seed=0):
    """Groups of `groups[i]` answers. Prompts and answers begin alike or are the same, since they
    are made of two tokens; the ids stay below 64."""
    draw, items = random.Random(seed), []
    for group, count in enumerate(groups):
        prompt = [1, 2, 2, 1, 1, 2, 1, 1, *(draw.randint(1, 2) for _ in range(draw.randint(0, 12)))]
        items += [branching_item(len(items) + number, draw, prompt, group=group) for number in range(count)]
    return items


class ListSource:
    """Returns deep copies of the batches in turn, over and over."""

    def __init__(self, *batches, meta=None):
        self.batches, self.meta, self.position = batches, meta or {}, 0

    async def next_batch(self):
        items = self.batches[self.position % len(self.batches)]
        self.position += 1
        return SAWBatch(list(items), {"target_rollouts": len(items), **self.meta})


class DrawingSource:
    """Draws new samples from the random generators of Python and torch; with `share`, groups that
    share a prompt. Its state is a counter."""

    def __init__(self, count=8, *, share=False):
        self.count, self.share, self.drawn = count, share, 0

    async def next_batch(self):
        seed = random.getrandbits(20) + int(torch.randint(1 << 20, ()))
        seed += self.drawn
        items = branching_items((self.count // 2,) * 2, seed) if self.share else sorting_items(self.count, seed=seed)
        for item in items:
            item.meta["rollout_id"] = f"{self.drawn}/{item.meta['rollout_id']}"
        self.drawn += 1
        return SAWBatch(items, {"target_rollouts": self.count})

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


def cpu_config(**changes):
    return TrainerConfig(**{"model_device": "cpu", "max_seq_len": 32, "micro_token_budget": 128, "lr": 1e-2, **changes})


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gradients_of(model):
    return {name: parameter.grad.detach().clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_tensors(left, right, *, atol=0.0):
    assert left.keys() == right.keys()
    for name in left:
        difference = (left[name] - right[name]).abs().max().item()
        assert difference <= atol, f"{name} differs by {difference}"


def without_times(stats):
    """The statistics without durations and speeds, which differ between two equal runs."""
    speeds = ("perf/tflops", "perf/mfu", "perf/tokens_per_s_per_gpu")
    return {name: value for name, value in stats.items() if not name.endswith("_s") and name not in speeds}
