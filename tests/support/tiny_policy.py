"""A model small enough for a server on two cores, with head_dim 32 and a vocabulary larger than the
tokenizer's."""

from pathlib import Path

VOCABULARY = 384
"""The tokenizer has 261 ids. The model also samples ids beyond them, which decode to nothing, so
re-tokenising its text gives other ids."""
MAX_POSITIONS = 512


def make_tiny_policy(seed=0):
    """A float32 Qwen2 of 123 thousand parameters, with weights large enough that its distributions
    are peaked."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=128,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()


def tiny_tokenizer():
    """A byte tokenizer with the two ChatML markers. `<|im_end|>` is the end token."""
    from chat_tokenizers import CHATML, chat_tokenizer

    return chat_tokenizer(CHATML)


def save_tiny_policy(folder: Path, seed=0):
    """Save model and tokenizer in Hugging Face format. Returns the model."""
    model, tokenizer = make_tiny_policy(seed), tiny_tokenizer()
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
