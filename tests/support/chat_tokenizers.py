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
