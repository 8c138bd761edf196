"""Models with random weights that benchmarks train and sample with: a Qwen2 of any size, and the
one of 100 million parameters, saved beside a tokenizer of words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 32_000
END_IDS = [3 + 63 * i for i in range(500)]
"""The tokens that end an answer: one in 64 of the vocabulary."""


def make_qwen2(
    vocabulary: int, *, width: int, inner: int, layers: int, heads: int, key_value_heads: int, seed: int = 0, **settings: Any
) -> Any:
    """A Qwen2 in float32, on torch's default device. `settings` are others of its configuration."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        **settings,
    )
    return Qwen2ForCausalLM(config)


def save_large_model(folder: Path) -> None:
    """Save a Qwen2 of 100 million parameters, and a tokenizer that knows its end tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    sizes = {"width": 768, "inner": 2048, "layers": 12, "heads": 12, "key_value_heads": 4}
    ids = {"bos_token_id": None, "eos_token_id": END_IDS[0], "pad_token_id": 0}
    model = make_qwen2(VOCABULARY, **sizes, max_position_embeddings=1024, tie_word_embeddings=True, **ids)
    model.generation_config.eos_token_id = END_IDS
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}.": i for i in range(VOCABULARY)}, unk_token="w1."))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0.", eos_token=f"w{END_IDS[0]}.", unk_token="w1.")
    # Beside the configuration of a Qwen2, `AutoTokenizer` would make a tokenizer of Qwen2 of it.
    tokenizer.save_pretrained(folder / "tokenizer")


def load_large_model(folder: Path) -> tuple[Any, Any]:
    """The model and the tokenizer that `save_large_model` wrote."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder / "tokenizer")


def plain_words() -> list[str]:
    """The words of the large model's vocabulary that are no end tokens."""
    return [f"w{i}." for i in plain_ids()]


def plain_ids() -> list[int]:
    """The ids of `plain_words`."""
    ends = set(END_IDS)
    return [i for i in range(3, VOCABULARY) if i not in ends]
