"""Preference pairs in byte-tokenizer ids, and a reward model of 10,000 parameters."""

import random
from dataclasses import replace

import torch

from ludic.models.byte_tokenizer import PAD_ID, VOCAB_SIZE, make_byte_tokenizer
from ludic.training import DPOTrainerConfig, RMTrainerConfig, SAWItem

TOKENIZER = make_byte_tokenizer()


def reward_model(seed=0, **changes):
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "max_position_embeddings": 128,
        "num_labels": 1,
        "pad_token_id": PAD_ID,
        "initializer_range": 0.2,
    }
    return Qwen2ForSequenceClassification(Qwen2Config(**{**settings, **changes}))


def response(pair_id, role, prompt, answer, label=1.0, **meta):
    """Encodes `prompt` and `answer` as text and appends the end token to the answer."""
    prompt_ids, answer_ids = TOKENIZER.encode(prompt), [*TOKENIZER.encode(answer), TOKENIZER.eos_token_id]
    return SAWItem(
        input_ids=prompt_ids + answer_ids,
        attention_mask=[1] * (len(prompt_ids) + len(answer_ids)),
        action_mask=[0] * len(prompt_ids) + [1] * len(answer_ids),
        weight=1.0,
        meta={"pair_id": pair_id, "role": role, "label": label, **meta},
    )


def pair(pair_id, prompt, chosen, rejected, label=1.0):
    return [response(pair_id, "chosen", prompt, chosen, label), response(pair_id, "rejected", prompt, rejected, label)]


def sorted_pairs(count, seed=0):
    """Pairs in which the chosen answer has the digits sorted and the rejected one has them
    reversed. Some labels are soft."""
    draw = random.Random(seed)
    items = []
    for index in range(count):
        digits = "".join(draw.sample("0123456789", draw.randint(2, 9)))
        right, wrong = "".join(sorted(digits)), "".join(sorted(digits, reverse=True))[: draw.randint(1, 9)]
        items += pair(f"p{index}", f"{digits}>", right, wrong, label=draw.choice([1.0, 1.0, 0.75]))
    return items


def with_reference(macro):
    """The batch with log-probabilities of a reference: -1 for the first token, -2 for the next."""
    counts = macro.table.target_counts.tolist()
    return replace(macro, token_columns={"reference_logps": {row: -torch.arange(1.0, 1 + n) for row, n in enumerate(counts)}})


def dpo_config(**changes):
    return DPOTrainerConfig(**{"model_device": "cpu", "max_seq_len": 32, "micro_token_budget": 128, "lr": 1e-2, **changes})


def rm_config(**changes):
    return RMTrainerConfig(**{"model_device": "cpu", "max_seq_len": 32, "micro_token_budget": 128, "lr": 1e-2, **changes})
