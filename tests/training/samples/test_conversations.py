"""The loss covers what the assistant says, for templates with and without generation marks. If
neither way can tell, it is an error."""

import pytest
from chat_tokenizers import CHATML, FORGETS_THOUGHTS, MARKED, chat_tokenizer, merging_tokenizer, trained_text
from hypothesis import given, settings, strategies as st

from ludic.errors import ConfigError, DataError
from ludic.training.samples.conversations import ChatTokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "six"},
]


def tokenized(template, messages, turns="all", **options):
    return ChatTokenizer(chat_tokenizer(template), turns).tokenize(messages, **options)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["unmarked", "marked"])
def test_only_answers_and_their_end_tokens_are_trained(template):
    tokenizer = chat_tokenizer(template)
    [tokens] = ChatTokenizer(tokenizer).tokenize(TALK)
    assert trained_text(tokenizer, tokens) == "4<|im_end|>|six<|im_end|>"
    assert tokenizer.decode(tokens.input_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\nsix<|im_end|>\n"
    )


def test_the_ids_by_hand():
    """The byte tokenizer has the ids 0 to 258; `<|im_end|>` is 259 and `<|im_start|>` is 260."""
    [tokens] = tokenized(CHATML, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    user, assistant = ([byte + 3 for byte in word] for word in (b"user\na", b"assistant\n"))
    tokenizer = chat_tokenizer(CHATML)
    end, start = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    assert {end, start} == {259, 260}
    line_break = ord("\n") + 3
    assert tokens.input_ids == [start, *user, end, line_break, start, *assistant, ord("b") + 3, end, line_break]
    assert tokens.action_mask == [0] * (1 + 6 + 2 + 1 + 10) + [1, 1, 0]  # the newline after the end token is never sampled


MESSAGES = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=8), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(MESSAGES)
def test_marked_and_unmarked_templates_agree(contents):
    talk = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(["hi", *contents])]
    assert tokenized(CHATML, talk) == tokenized(MARKED, talk)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["unmarked", "marked"])
def test_turns_selects_the_last_answer_or_one_sample_per_answer(template):
    tokenizer = chat_tokenizer(template)
    [last] = tokenized(template, TALK, "last")
    assert trained_text(tokenizer, last) == "six<|im_end|>"
    each = tokenized(template, TALK, "each")
    assert [trained_text(tokenizer, tokens) for tokens in each] == ["4<|im_end|>", "six<|im_end|>"]
    assert each[1] == last
    assert tokenizer.decode(each[0].input_ids).endswith("4<|im_end|>\n")


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["unmarked", "marked"])
def test_answers_in_the_prompt_are_not_trained(template):
    tokenizer = chat_tokenizer(template)
    [tokens] = tokenized(template, TALK, first=4)
    assert trained_text(tokenizer, tokens) == "six<|im_end|>"


def test_text_after_the_last_answer_is_not_trained():
    tokenizer = chat_tokenizer(CHATML)
    [tokens] = tokenized(CHATML, [*TALK, {"role": "user", "content": "thanks"}])
    assert trained_text(tokenizer, tokens) == "4<|im_end|>|six<|im_end|>"


def test_a_rewritten_history_is_an_error_unless_each_answer_is_its_own_sample():
    talk = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>easy</think>4"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "<think>yes</think>yes"},
    ]
    with pytest.raises(DataError, match=r"row 7: .*message 1 .*prefix .*assistant_turns=each"):
        tokenized(FORGETS_THOUGHTS, talk, where="row 7")
    tokenizer = chat_tokenizer(FORGETS_THOUGHTS)
    each = tokenized(FORGETS_THOUGHTS, talk, "each")
    assert [trained_text(tokenizer, tokens) for tokens in each] == [
        "<think>easy</think>4<|im_end|>",
        "<think>yes</think>yes<|im_end|>",
    ]
    assert "easy" not in tokenizer.decode(each[1].input_ids)


def test_a_token_that_merges_prompt_and_answer_is_an_error():
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
    )
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m.role }}", "{{ 'bot' if m.role == 'assistant' else m.role }}")
    talk = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "yes"}]
    joined = tokenizer("user:go bot:yes ", add_special_tokens=False)["input_ids"]
    alone = tokenizer("user:go bot:", add_special_tokens=False)["input_ids"]
    assert joined[: len(alone)] != alone  # the merge that this test needs
    with pytest.raises(DataError, match=r"assistant message 1 .*prefix .*on token ids"):
        ChatTokenizer(tokenizer).tokenize(talk)


def test_a_token_across_the_boundary_of_a_marked_span_is_an_error():
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}bot:{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}user:{{ m.content }} {% endif %}{% endfor %}"
    )
    talk = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "yes"}]
    with pytest.raises(DataError, match=r"crosses a \{% generation %\} border at"):
        ChatTokenizer(tokenizer).tokenize(talk)


def test_multibyte_characters_are_masked_as_a_whole():
    tokenizer = chat_tokenizer(MARKED)
    [tokens] = ChatTokenizer(tokenizer).tokenize([{"role": "user", "content": "é?"}, {"role": "assistant", "content": "日本"}])
    assert trained_text(tokenizer, tokens) == "日本<|im_end|>"
    assert sum(tokens.action_mask) == 2 * 3 + 1


def test_a_span_that_ends_in_dropped_white_space_marks_nothing_after_it():
    """The tokenizer drops white space. transformers' own mask would continue to the end of the
    text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<eos>": 0, "hi": 1, "yo": 2, "ok": 3}, unk_token="<eos>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} {% endgeneration %}"
        "{% else %}{{ m.content }} {% endif %}{% endfor %}"
    )
    talk = [("user", "hi"), ("assistant", "yo"), ("user", "ok")]
    [tokens] = ChatTokenizer(tokenizer).tokenize([{"role": role, "content": text} for role, text in talk])
    assert (tokens.input_ids, tokens.action_mask) == ([1, 2, 3], [0, 1, 0])


def test_a_multibyte_character_at_the_end_of_a_span_is_marked_to_its_last_byte():
    """transformers' own mask ends at its first byte."""
    tokenizer = chat_tokenizer(
        MARKED.replace("{{ m.content }}<|im_end|>{% endgeneration %}", "{{ m.content }}{% endgeneration %}<|im_end|>")
    )
    [tokens] = ChatTokenizer(tokenizer).tokenize([{"role": "user", "content": "?"}, {"role": "assistant", "content": "é"}])
    assert trained_text(tokenizer, tokens) == "é"


def test_a_newline_after_the_end_token_is_not_trained_even_if_marked():
    [tokens] = tokenized(MARKED.replace("<|im_end|>{% endgeneration %}", "<|im_end|>\n{% endgeneration %}", 1), TALK)
    assert trained_text(chat_tokenizer(MARKED), tokens) == "4<|im_end|>|six<|im_end|>"


def test_with_marks_the_history_may_be_rewritten_and_the_prompt_need_not_be_a_prefix():
    marked = MARKED.replace("{{ m.content }}<|im_end|>{% endgen", "{{ m.content if loop.last else '-' }}<|im_end|>{% endgen")
    marked = marked.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>{% endif %}")
    tokenizer = chat_tokenizer(marked)
    each = tokenized(marked, TALK, "each")
    assert [trained_text(tokenizer, tokens) for tokens in each] == ["4<|im_end|>", "six<|im_end|>"]
    assert "\n-<|im_end|>" in tokenizer.decode(each[1].input_ids)


def test_adjacent_marked_blocks_merge_and_others_must_be_one_per_message():
    twice = MARKED.replace(
        "{{ m.content }}<|im_end|>{% endgen", "{{ m.content }}{% endgeneration %}{% generation %}<|im_end|>{% endgen"
    )
    [tokens] = tokenized(twice, TALK, "last")
    assert trained_text(chat_tokenizer(twice), tokens) == "six<|im_end|>"
    apart = twice.replace("{% endgeneration %}{% generation %}", "{% endgeneration %} {% generation %}")
    [tokens] = tokenized(apart, TALK)
    assert trained_text(chat_tokenizer(apart), tokens) == "4|<|im_end|>|six|<|im_end|>"
    with pytest.raises(DataError, match="marks 4 spans for 2 assistant messages"):
        tokenized(apart, TALK, "last")


def test_an_error_of_the_template_names_the_row():
    with pytest.raises(DataError, match="row 3 has no assistant message"):
        tokenized(CHATML, TALK[:2], where="row 3")
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"row 3: .*template refuses .*roles must alternate"):
        tokenized(refusing, TALK, where="row 3")
    with pytest.raises(ConfigError, match=r"has no chat template; set chat_template=FILE.*network\.end_of_turn=newline"):
        tokenized(None, TALK)
    with pytest.raises(ConfigError, match="must be one of all, last, each"):
        ChatTokenizer(None, "some")


def test_tools_and_template_settings_reach_the_template():
    template = CHATML.replace("{% for m", "{% if tools %}T{{ tools[0].function.name }}{% endif %}{{ mood }}{% for m", 1)
    tokenizer = chat_tokenizer(template)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    [tokens] = ChatTokenizer(tokenizer, "all", {"mood": "calm"}).tokenize(TALK, tools=tools)
    assert tokenizer.decode(tokens.input_ids).startswith("Tlookcalm<|im_start|>system")


@pytest.mark.parametrize("make", [ChatTokenizer, lambda tokenizer: ChatTokenizer(tokenizer, "each")])
def test_tools_that_the_template_leaves_out_are_an_error(make):
    """As with SmolLM2's, which renders roles and contents only."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    for template in (CHATML, MARKED):
        with pytest.raises(DataError, match=r"line 1 has tools, .*chat_template .*`tools`"):
            make(chat_tokenizer(template)).tokenize(talk, tools=tools, where="line 1")
    [shown] = make(chat_tokenizer("{{ tools[0].function.name }}" + CHATML)).tokenize(talk, tools=tools)
    assert chat_tokenizer(CHATML).decode(shown.input_ids).startswith("look<|im_start|>")
