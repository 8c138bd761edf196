"""Byte tokenizers with chat templates, and a BPE tokenizer that merges tokens across message
boundaries."""

from functools import cache

from ludic.models.byte_tokenizer import make_byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Removes the reasoning of earlier turns, as the templates of reasoning models do."""


@cache
def chat_tokenizer(template):
    """A byte tokenizer in which `<|im_start|>` and `<|im_end|>` are one token each. `<|im_end|>` is
    the end token."""
    tokenizer = make_byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return tokenizer


@cache
def merging_tokenizer():
    """A BPE tokenizer trained on a few sentences. It often merges the colon with the word after
    it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(["bot:yes", "bot:yes bot:yes", "user:go bot:yes"] * 50, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<eos>", clean_up_tokenization_spaces=False
    )


@cache
def pairs_tokenizer():
    """A BPE tokenizer of digits in which some digit pairs are one token, so re-tokenising a sampled
    text usually gives fewer tokens."""
    from tokenizers import Tokenizer, decoders, models, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=24, special_tokens=["<eos>"], initial_alphabet=list("0123456789>"), show_progress=False
    )
    core.train_from_iterator([f"{a}{(a * 3 + 1) % 10}" for a in range(10)] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<eos>", clean_up_tokenization_spaces=False
    )


def trained_text(tokenizer, tokens):
    """The text under the action mask, with `|` between separate spans."""
    pieces, piece = [], []
    for token, is_action in [*zip(tokens.input_ids, tokens.action_mask, strict=True), (0, 0)]:
        if is_action:
            piece.append(token)
        elif piece:
            pieces.append(tokenizer.decode(piece))
            piece = []
    return "|".join(pieces)


TOOL_CHATML = (
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}"
    "{% endfor %}{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > ns.asked %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with tools in the format of Hermes. It shows the reasoning of answers after the last
message of the user only."""


@cache
def bpe_tokenizer(template=TOOL_CHATML, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>"):
    """A byte-level BPE tokenizer with a few hundred merges of English: most texts have other tokens
    than a model that samples letter by letter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = "the answer question look tool call name user assistant go on think done result four step number"
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([f"{one} {two}" for one in words.split() for two in words.split()], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=eos, pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    made.chat_template = template
    return made


def spell(tokenizer, text):
    """Ids of a text, one or more for each letter: not those that the tokenizer makes of it."""
    return [token for letter in text for token in tokenizer(letter, add_special_tokens=False)["input_ids"]]
