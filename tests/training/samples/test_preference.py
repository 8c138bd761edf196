"""Rows of preference data as pairs of samples: TRL's formats, what is trained, what is truncated,
what is refused."""

import logging
import re

import pytest
from chat_tokenizers import CHATML, FORGETS_THOUGHTS, chat_tokenizer, merging_tokenizer, trained_text
from hypothesis import given, strategies as st

from ludic.errors import ConfigError, DataError
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.training import (
    create_preference_saw_items,
    format_chat_template_text,
    load_preference_items,
    preference_dataset_to_saw_items,
    shuffle_preference_pairs,
    tokenize_with_chat_template,
)
from ludic.training.batching import group_preference_pairs
from ludic.training.samples.conversations import ChatTokens
from ludic.training.samples.preference import PreferenceItems

BYTES = make_byte_tokenizer()
CHAT = chat_tokenizer(CHATML)


def chat_message(role, content):
    return {"role": role, "content": content}


def prompt_and_response(tokenizer, item):
    """(prompt, text under the action mask)."""
    prompt = tokenizer.decode(item.input_ids[: item.meta["prompt_length"]])
    return prompt, trained_text(tokenizer, ChatTokens(item.input_ids, item.action_mask))


def chosen_and_rejected(tokenizer, row, **settings):
    return [
        prompt_and_response(tokenizer, item) for item in PreferenceItems(tokenizer, **settings).of_row(row, "row 1", pair_id="p")
    ]


# --- row formats


def test_an_explicit_text_prompt_gives_prompt_response_and_end_token():
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "five"}
    assert chosen_and_rejected(BYTES, row) == [("2+2=", "4<eos>"), ("2+2=", "five<eos>")]


def test_an_implicit_text_prompt_ends_where_the_two_texts_differ():
    row = {"chosen": "2+2=4", "rejected": "2+2=five"}
    assert chosen_and_rejected(BYTES, row) == [("2+2=", "4<eos>"), ("2+2=", "five<eos>")]
    # one text is a prefix of the other: only the end token separates them
    assert chosen_and_rejected(BYTES, {"chosen": "ab", "rejected": "abc"}) == [("ab", "<eos>"), ("ab", "c<eos>")]


def test_the_implicit_prompt_is_found_on_tokens_and_not_retokenised():
    tokenizer = merging_tokenizer()
    row = {"chosen": "user:go bot:yes", "rejected": "user:go bot:no"}
    for item, text in zip(PreferenceItems(tokenizer).of_row(row, "row 1", pair_id="p"), row.values(), strict=True):
        assert item.input_ids == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


PROMPT, GOOD, BAD = chat_message("user", "2+2="), chat_message("assistant", "4"), chat_message("assistant", "5")
WRITTEN = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [PROMPT], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [PROMPT, GOOD], "rejected": [PROMPT, BAD]},
        {"prompt": "2+2=", "chosen": [PROMPT, GOOD], "rejected": [PROMPT, BAD]},
        {"prompt": "2+2=", "chosen": [GOOD], "rejected": [BAD]},
    ],
    ids=["explicit", "implicit", "implicit beside its text", "text, then messages"],
)
def test_conversations_end_with_the_end_token_of_the_response(row):
    """The template writes a newline after it, which a policy never samples."""
    assert chosen_and_rejected(CHAT, row) == [(WRITTEN, "4<|im_end|>"), (WRITTEN, "5<|im_end|>")]


def test_conversations_split_at_a_message_and_all_later_assistant_text_is_the_response():
    start = [chat_message("user", "a"), chat_message("assistant", "b")]
    rest = [chat_message("user", "c"), chat_message("assistant", "d")]
    chosen, rejected = PreferenceItems(CHAT).of_row(
        {"chosen": [*start, *rest], "rejected": [start[0], chat_message("assistant", "x"), *rest]}, "row 1", pair_id="p"
    )
    assert prompt_and_response(CHAT, chosen)[1] == "b<|im_end|>|d<|im_end|>"
    assert prompt_and_response(CHAT, rejected)[1] == "x<|im_end|>|d<|im_end|>"


def test_text_rows_can_be_rendered_by_the_chat_template():
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    assert chosen_and_rejected(CHAT, row, use_chat_template=True) == [(WRITTEN, "4<|im_end|>"), (WRITTEN, "5<|im_end|>")]
    add_system_prompt = chosen_and_rejected(CHAT, row, use_chat_template=True, system_prompt="be brief")
    assert add_system_prompt[0] == ("<|im_start|>system\nbe brief<|im_end|>\n" + WRITTEN, "4<|im_end|>")


def test_a_conversation_keeps_its_own_system_message():
    row = {"prompt": [chat_message("system", "be long"), PROMPT], "chosen": [GOOD], "rejected": [BAD]}
    assert chosen_and_rejected(CHAT, row, system_prompt="be brief")[0][0].startswith("<|im_start|>system\nbe long")


def test_tools_and_arguments_of_a_row_reach_the_template():
    shows = CHATML.replace("{% for", "{% if tools %}{{ tools[0].name }} {{ mood }}{% endif %}{% for", 1)
    row = {"prompt": [PROMPT], "chosen": [GOOD], "rejected": [BAD], "tools": [{"name": "calc"}]}
    [(prompt, _), _] = chosen_and_rejected(chat_tokenizer(shows), {**row, "chat_template_kwargs": {"mood": "calm"}})
    assert prompt == "calc calm" + WRITTEN


def test_an_end_token_is_not_added_twice():
    row = {"prompt": "a", "chosen": "b<|im_end|>", "rejected": "c"}
    assert chosen_and_rejected(CHAT, row) == [("a", "b<|im_end|>"), ("a", "c<|im_end|>")]


# --- meta of the samples


def test_samples_record_their_pair():
    chosen, rejected = create_preference_saw_items("2+2=", "4", "5", BYTES, label=0.75, pair_id="sum")
    assert chosen.meta.pop("prompt_digest") == rejected.meta["prompt_digest"]
    assert chosen.meta == {"pair_id": "sum", "role": "chosen", "label": 0.75, "completion_length": 2, "prompt_length": 4}
    assert rejected.meta["role"] == "rejected"
    assert chosen.weight == 1.0
    assert chosen.attention_mask == [1] * 6
    assert isinstance(chosen.input_ids, list)
    assert group_preference_pairs([rejected, chosen]) == [(chosen, rejected)]


def test_a_pair_without_an_id_gets_a_unique_one():
    names = {create_preference_saw_items("a", "b", "c", BYTES)[0].meta["pair_id"] for _ in range(3)}
    assert len(names) == 3


# --- truncation


def test_long_text_loses_the_start_of_its_prompt():
    chosen, rejected = create_preference_saw_items("12345", "67", "8", BYTES, max_length=6)
    assert [prompt_and_response(BYTES, item) for item in (chosen, rejected)] == [("345", "67<eos>"), ("2345", "8<eos>")]
    assert chosen.meta["truncation"] == {
        "original_len": 8,
        "truncated_len": 6,
        "prompt_truncated": True,
        "completion_truncated": False,
    }
    assert chosen.meta["truncated"] is chosen.meta["seq_len_truncated"] is True
    assert chosen.meta["truncation_reason"] == "max_length"
    assert (chosen.meta["seq_len_original"], chosen.meta["seq_len_retained"], chosen.meta["seq_len_retained_frac"]) == (
        8,
        6,
        0.75,
    )


def test_a_response_longer_than_the_limit_keeps_its_end():
    chosen, _ = create_preference_saw_items("12", "34567", "8", BYTES, max_length=4)
    assert prompt_and_response(BYTES, chosen) == ("", "567<eos>")
    assert chosen.meta["truncation"]["completion_truncated"]


def test_a_long_conversation_loses_the_end_of_its_response():
    short = len(CHAT(WRITTEN)["input_ids"])
    chosen, _ = create_preference_saw_items("2+2=", "four", "5", CHAT, use_chat_template=True, max_length=short + 2)
    assert prompt_and_response(CHAT, chosen) == (WRITTEN, "fo")
    assert chosen.meta["truncation"]["completion_truncated"]
    assert not chosen.meta["truncation"]["prompt_truncated"]
    with pytest.raises(ValueError, match=rf"{short} tokens .*max_length \({short}\)"):
        create_preference_saw_items("2+2=", "four", "5", CHAT, use_chat_template=True, max_length=short)


def test_samples_that_fit_are_not_marked_as_truncated():
    chosen, _ = create_preference_saw_items("12", "3", "4", BYTES, max_length=4)
    assert "truncated" not in chosen.meta


@given(st.text("abc", max_size=9), st.text("abc", min_size=1, max_size=9), st.integers(2, 12))
def test_no_sample_exceeds_the_limit_and_each_keeps_part_of_its_response(prompt, answer, max_length):
    for item in create_preference_saw_items(prompt, answer, answer + "d", BYTES, max_length=max_length):
        assert len(item.input_ids) == len(item.attention_mask) == len(item.action_mask) <= max_length
        assert item.input_ids[-1] == BYTES.eos_token_id
        assert sum(item.action_mask) == item.meta["completion_length"] > 0
        assert item.meta["prompt_length"] + item.meta["completion_length"] == len(item.input_ids)


# --- invalid rows


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a", "rejected": None}, "lists of messages, not str and NoneType"),
        ({"chosen": "a", "rejected": [GOOD]}, "not str and list"),
        ({"prompt": [PROMPT], "chosen": "a", "rejected": "b"}, "prompt must be text .*not list"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "empty completion"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"chosen": "b", "rejected": "b"}, "are the same"),
        ({"prompt": [PROMPT], "chosen": [chat_message("user", "x")], "rejected": [BAD]}, "must end with an assistant message"),
        ({"chosen": [], "rejected": []}, "not list and list"),
    ],
)
def test_rows_that_are_not_pairs_are_named(row, message):
    with pytest.raises(DataError, match=f"^data.jsonl, line 7.*{message}"):
        PreferenceItems(CHAT).of_row(row, "data.jsonl, line 7", pair_id="p")


def test_rendering_text_needs_an_explicit_prompt():
    with pytest.raises(DataError, match=r"row 1 has no prompt, .*use_chat_template"):
        chosen_and_rejected(CHAT, {"chosen": "ab", "rejected": "ac"}, use_chat_template=True)
    with pytest.raises(DataError, match="empty chosen response"):
        chosen_and_rejected(CHAT, {"prompt": "a", "chosen": "", "rejected": "ac"}, use_chat_template=True)


def test_invalid_labels_and_lengths_are_refused():
    with pytest.raises(DataError, match=r"label of pair sum \(2\) .*least 0 and at most 1"):
        create_preference_saw_items("2+2=", "4", "5", BYTES, label=2, pair_id="sum")
    with pytest.raises(ConfigError, match="max_length"):
        create_preference_saw_items("2+2=", "4", "5", BYTES, max_length=0)
    with pytest.raises(DataError, match=r"are the same within max_length \(1\)"):  # only the end token is left of both
        create_preference_saw_items("2+2=", "4", "5", BYTES, max_length=1)


# --- data sets


def test_all_rows_become_pairs_in_order():
    rows = [{"q": f"{k}+1=", "good": f"{k + 1}", "bad": "0", "sure": 0.5 + k / 4} for k in range(3)]
    items = preference_dataset_to_saw_items(rows, BYTES, prompt_col="q", chosen_col="good", rejected_col="bad", label_col="sure")
    assert [(item.meta["pair_id"], item.meta["role"], item.meta["label"]) for item in items] == [
        (f"pref_{k}", role, 0.5 + k / 4) for k in range(3) for role in ("chosen", "rejected")
    ]
    assert prompt_and_response(BYTES, items[2]) == ("1+1=", "2<eos>")


def test_rows_that_are_not_pairs_are_skipped_with_a_warning_or_refused(caplog):
    rows = [
        {"prompt": "a", "chosen": "", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
    ]
    with caplog.at_level(logging.WARNING):
        items = preference_dataset_to_saw_items(rows, BYTES)
    assert [item.meta["pair_id"] for item in items] == ["pref_1", "pref_1"]
    assert re.search("2 rows make no pair: row 0 .*empty", caplog.text)
    with pytest.raises(DataError, match="row 0 has an empty completion"):
        preference_dataset_to_saw_items(rows, BYTES, strict=True)
    with pytest.raises(DataError, match="1 rows make no pair: row 0"):
        preference_dataset_to_saw_items(rows[:1], BYTES)


def test_a_data_set_of_the_datasets_library_is_accepted():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    assert [prompt_and_response(BYTES, item) for item in preference_dataset_to_saw_items(data, BYTES)] == [
        ("a", "b<eos>"),
        ("a", "c<eos>"),
    ]


def test_files_are_read_and_errors_name_the_row(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        '{"chosen": "ab", "rejected": "ac"}\n\n{"chosen": "ab", "rejected": "ab"}\n{"chosen": "xb", "rejected": "xc"}\n'
    )
    items = load_preference_items(str(path), BYTES)
    assert [item.meta["pair_id"] for item in items[::2]] == ["pref_0", "pref_2"]
    assert items[0].input_ids.dtype == "int32"
    assert len(load_preference_items(str(path), BYTES, limit=1, seed=1)) == 2
    path.write_text('{"chosen": "ab", "rejected": "ac"}\n{"chosen": "ab", "rejected": 5}\n')
    with pytest.raises(DataError, match=r"pairs.jsonl, line 2: rejected must be text"):
        load_preference_items(str(path), BYTES)


def test_scored_responses_become_preferences(tmp_path):
    path = tmp_path / "shp.jsonl"
    path.write_text(
        '{"history": "why? ", "human_ref_A": "so", "human_ref_B": "thus", "score_A": 3, "score_B": 12, "labels": 0}\n'
        '{"history": "how? ", "human_ref_A": "well", "human_ref_B": "badly", "score_A": 9, "score_B": 1, "labels": 1}\n'
    )
    items = load_preference_items(str(path), BYTES)
    assert [prompt_and_response(BYTES, item) for item in items] == [
        ("why? ", "thus<eos>"),
        ("why? ", "so<eos>"),
        ("how? ", "well<eos>"),
        ("how? ", "badly<eos>"),
    ]


def test_conversations_with_a_text_prompt_are_read(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(
        '{"prompt": "2+2=", "chosen": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}], '
        '"rejected": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "5"}]}\n'
    )
    items = load_preference_items(str(path), CHAT)
    assert [prompt_and_response(CHAT, item) for item in items] == [(WRITTEN, "4<|im_end|>"), (WRITTEN, "5<|im_end|>")]


# --- order


@given(st.integers(1, 8), st.integers(0, 5))
def test_shuffling_keeps_pairs_together(count, seed):
    rows = [{"prompt": f"{k}", "chosen": "b", "rejected": "c"} for k in range(count)]
    items = preference_dataset_to_saw_items(rows, BYTES)
    shuffled = shuffle_preference_pairs(items, seed)
    names = [item.meta["pair_id"] for item in shuffled]
    assert names[::2] == names[1::2]
    assert sorted(map(id, shuffled)) == sorted(map(id, items))
    assert shuffle_preference_pairs(items, seed) == shuffled


def test_the_order_is_a_function_of_the_seed():
    items = preference_dataset_to_saw_items([{"prompt": f"{k}", "chosen": "b", "rejected": "c"} for k in range(20)], BYTES)
    assert len({tuple(item.meta["pair_id"] for item in shuffle_preference_pairs(items, seed)) for seed in range(5)}) == 5


# --- one prompt and one completion


def test_a_prompt_and_a_completion_are_rendered_by_the_template():
    found = tokenize_with_chat_template(CHAT, "2+2=", "4", system_prompt="be brief")
    before = "<|im_start|>system\nbe brief<|im_end|>\n" + WRITTEN
    assert found.text == before + "4<|im_end|>"
    assert CHAT.decode(found.tokens) == found.text
    assert CHAT.decode(found.tokens[: found.prompt_len]) == before
    assert found.truncation_meta is None
    assert format_chat_template_text(CHAT, "2+2=", "4", system_prompt="be brief") == found.text


def test_a_truncated_completion_is_marked():
    whole = tokenize_with_chat_template(CHAT, "2+2=", "four")
    cut = tokenize_with_chat_template(CHAT, "2+2=", "four", max_length=whole.prompt_len + 1)
    assert cut.tokens == whole.tokens[: whole.prompt_len + 1]
    assert cut.prompt_len == whole.prompt_len
    assert cut.truncation_meta["truncation"]["original_len"] == len(whole.tokens)
    with pytest.raises(ValueError, match="fills max_length"):
        tokenize_with_chat_template(CHAT, "2+2=", "four", max_length=whole.prompt_len)
    with pytest.raises(ValueError, match="empty"):
        tokenize_with_chat_template(CHAT, "2+2=", "")


def test_without_an_end_token_in_the_template_the_text_after_the_response_is_kept():
    plain = chat_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert format_chat_template_text(plain, "<|im_end|>", "4") == "user: <|im_end|>\nassistant: 4\n"


def test_templates_that_rewrite_earlier_turns_work_for_a_single_response():
    tokenizer = chat_tokenizer(FORGETS_THOUGHTS)
    row = {"prompt": [PROMPT], "chosen": [chat_message("assistant", "so</think>4")], "rejected": [BAD]}
    assert chosen_and_rejected(tokenizer, row)[0][1] == "so</think>4<|im_end|>"
