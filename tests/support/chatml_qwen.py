"""A small Qwen2 on disk with ChatML's tokens, whose answers are a few given phrases."""

import json
from functools import cache
from pathlib import Path

TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'Be helpful.') }}
{{- '\\n\\n<tools>' }}{% for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
END, SPECIAL = "<|im_end|>", ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = """\
You solve programming problems in Python. If a problem names a function, define it; else your program reads its input from stdin
and prints its answer. Think first, then write the whole program in one block, which must be the last one of your answer.
Solve the problem step by step. Use the tool calculate for every calculation. Put the final number in the box.
{"type": "function", "function": {"name": "calculate", "description": "Calculate an expression and return the number.", "parameters":
{"type": "object", "properties": {"expression": {"type": "string", "description": "numbers and operators"}}, "required": []}}}"""


@cache
def _learn_merges():
    """(vocabulary, merges) of a BPE over bytes that has the words of prompts as tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([WORDS] * 4, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
    model = json.loads(core.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def make_tokenizer(phrases=(), *, eos=END):
    """Qwen2's tokenizer with a small vocabulary; each phrase is one token."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    vocabulary, merges = _learn_merges()
    tokenizer = Qwen2Tokenizer(vocab=dict(vocabulary), merges=merges, eos_token=eos, pad_token=SPECIAL[0])
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_model(folder: Path, phrases=(), *, eos=END) -> str:
    """Random weights, so that after any token each phrase and the end of the turn are as likely as
    the others, within a few hundredths, and other tokens are not sampled."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer(phrases, eos=eos)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    said = tokenizer.convert_tokens_to_ids([*phrases, END])
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] += 4.0  # the last norm makes of it about sqrt(16) = 4
        model.lm_head.weight[:, 0] = -5.0
        model.lm_head.weight[said, 0] = 5.0
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
