"""Small tokenizers with the structure of well-known families: their special tokens, their end and
padding tokens, their kind of BPE, and templates written here that render as theirs do."""

import json
from dataclasses import dataclass, field
from functools import cache

SAMPLES = ["system user assistant model final analysis", "What is 2+2? Be brief.", "It is 4.", "think hard about it"] * 20

_CHATML_TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}" + _CHATML_TURNS
)
QWEN3 = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{%- set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{%- if loop.last %}{{- '<think>\n' + m.reasoning_content|default('') + '\n</think>\n\n' }}{%- endif %}{{- said }}"
    "{%- else %}{{- m.content }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- for m in messages %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{- m.content | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set start = 1 if messages[0].role == 'system' else 0 %}{% for m in messages[start:] %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + (messages[0].content + '\n\n' if start and loop.last else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
HARMONY = (
    "{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort|default('medium') + '<|end|>' }}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}"
    "{%- else %}{{- '<|start|>' + ('developer' if m.role == 'system' else m.role) + '<|message|>' + m.content + '<|end|>' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
OLMO = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% if not loop.last or m.role != 'assistant' %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
GLM4 = (
    "[gMASK]<sop>{% for m in messages %}{{ ('<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>') + '\n' + m.content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
ADDED_END = (
    "{% for m in messages %}{{ '\n\n' + m.role + ':\n' + m.content }}{% if m.role == 'assistant' %}{{ '\n\n<|eot|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\n\nassistant:\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """How a family's tokenizer is made, and how its turns end."""

    template: str
    special: tuple[str, ...]
    eos: str
    turn_end: str
    pad: str | None = None
    bos: str | None = None
    plain: tuple[str, ...] = ()
    """Added tokens that are not special."""
    pieces: bool = False
    """SentencePiece's kind of BPE, with `▁` for a space; else bytes."""
    generation_eos: tuple[str, ...] = ()
    """The end tokens of its generation config."""
    kwargs: dict[str, object] = field(default_factory=dict)
    """An argument of its template that changes the prompt."""
    rewrites: bool = False
    """It renders an answer differently when another message follows."""


CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = {
    "qwen2.5 base": Family(CHATML, CHATML_TOKENS, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
    "qwen2.5 instruct": Family(
        CHATML, CHATML_TOKENS, "<|im_end|>", "<|im_end|>", "<|endoftext|>", generation_eos=("<|im_end|>", "<|endoftext|>")
    ),
    "qwen3": Family(
        QWEN3,
        CHATML_TOKENS,
        "<|im_end|>",
        "<|im_end|>",
        "<|endoftext|>",
        plain=("<think>", "</think>"),
        kwargs={"enable_thinking": False},
        rewrites=True,
    ),
    "llama 3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|end_of_text|>",
        "<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "mistral": Family(MISTRAL, ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), "</s>", "</s>", bos="<s>", pieces=True),
    "gemma": Family(
        GEMMA,
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        "<end_of_turn>",
        "<pad>",
        "<bos>",
        pieces=True,
    ),
    "phi 3": Family(
        PHI3,
        ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
        "<|endoftext|>",
        "<|end|>",
        "<|endoftext|>",
        "<s>",
        pieces=True,
        generation_eos=("<|endoftext|>", "<|assistant|>", "<|end|>"),
    ),
    "phi 4": Family(PHI4, (*CHATML_TOKENS, "<|im_sep|>"), "<|endoftext|>", "<|im_end|>", "<|endoftext|>", "<|endoftext|>"),
    "smollm2": Family(CHATML, CHATML_TOKENS, "<|im_end|>", "<|im_end|>", "<|im_end|>", "<|im_start|>"),
    "deepseek": Family(
        DEEPSEEK,
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    "gpt-oss": Family(
        HARMONY,
        ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"),
        "<|return|>",
        "<|return|>",
        "<|endoftext|>",
        "<|startoftext|>",
        generation_eos=("<|return|>", "<|endoftext|>", "<|call|>"),
        kwargs={"reasoning_effort": "low"},
        rewrites=True,
    ),
    "olmo": Family(
        OLMO, ("<|endoftext|>", "<|padding|>"), "<|endoftext|>", "<|endoftext|>", "<|padding|>", "<|endoftext|>", plain=("  ",)
    ),
    "zephyr": Family(ZEPHYR, ("<unk>", "<s>", "</s>"), "</s>", "</s>", "</s>", "<s>", pieces=True),
    "glm 4": Family(
        GLM4,
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|endoftext|>",
        "<|user|>",
        "<|endoftext|>",
        generation_eos=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "added end": Family(ADDED_END, ("<|endoftext|>",), "<|endoftext|>", "<|eot|>", "<|endoftext|>", plain=("\n\n", "<|eot|>")),
}


@cache
def _core(pieces):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE(byte_fallback=pieces))
    if pieces:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    alphabet = [] if pieces else pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(SAMPLES, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False))
    made = json.loads(core.to_str())
    vocabulary = made["model"]["vocab"]
    for byte in range(256) if pieces else ():
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    return json.dumps(made)


def make_tokenizer(name):
    """A new tokenizer of the family."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    core = Tokenizer.from_str(_core(family.pieces))
    tokens = [
        AddedToken(token, special=True, normalized=False, rstrip=name == "phi 3" and token == "<|end|>")
        for token in family.special
    ]
    core.add_special_tokens(tokens)
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.plain])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=family.eos,
        pad_token=family.pad,
        bos_token=family.bos,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = family.template
    return tokenizer


def gemma_that_begins_texts():
    """Gemma's tokenizer as it is published: it puts `<bos>` before each text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer("gemma")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    return tokenizer
