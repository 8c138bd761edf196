"""Small models of several architectures, and the property that their generated samples must
have."""

import pytest
import torch
import transformers

SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
KINDS = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "a sliding window": ("MistralConfig", "MistralForCausalLM", {**LLAMA, "sliding_window": 4}),
    "learned positions": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3},
    ),
    "positions by bias": (
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
    ),
    "a state space": (
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "initializer_range": 0.3},
    ),
}


def make_model(kind):
    config, model, sizes = KINDS[kind]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()


def assert_trainable(model, jobs, completions):
    """Check that the recorded log-probabilities equal those of one forward pass over prompt and
    completion."""
    for job, completion in zip(jobs, completions, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([job.prompt_ids + completion.token_ids]), use_cache=False).logits[0].float()
        logp = torch.log_softmax(logits, dim=-1)
        expected = [logp[len(job.prompt_ids) - 1 + i, token].item() for i, token in enumerate(completion.token_ids)]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
