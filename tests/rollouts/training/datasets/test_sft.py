"""Samples of conversations: only what the assistant says is trained, whatever the form of the row,
and files of samples are read back."""

import json

import pytest
from chat_tokenizers import CHATML, MARKED, chat_tokenizer

from ludic.envs.maths import gsm8k_target
from ludic.errors import ConfigError, DataError, RowError
from ludic.files.jsonl import read_jsonl
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.rollouts.training.datasets import (
    compute_loss_mask,
    load_dataset_with_answers,
    load_rl_prompts,
    load_sft_dataset,
    prepare_sft_sample,
    tokenize_conversation,
)
from ludic.rollouts.training.datasets.dataset_loaders import (
    export_samples_to_huggingface_format,
    export_samples_to_jsonl,
    load_samples_from_jsonl,
)
from ludic.rollouts.training.types import SampleStatus

TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "tool", "content": "t"},
    {"role": "assistant", "content": "c"},
]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_only_what_the_assistant_says_is_trained(template):
    tokenizer = chat_tokenizer(template)
    tokens, spans = tokenize_conversation(TALK, tokenizer)
    mask = compute_loss_mask(tokens, spans)
    assert tokenizer.decode([token for token, m in zip(tokens, mask, strict=True) if m]) == "b<|im_end|>c<|im_end|>"
    assert tokens == tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]


def test_a_mask_is_one_outside_of_the_spans():
    assert compute_loss_mask([5, 6, 7, 8], [(0, 2), (3, 4)]) == [0, 0, 1, 0]
    with pytest.raises(DataError, match=r"span \(3, 5\) .*4 tokens"):
        compute_loss_mask([5, 6, 7, 8], [(3, 5)])


def test_a_prompt_with_its_answer():
    tokenizer = chat_tokenizer(CHATML)
    sample = prepare_sft_sample("2+2?", "4", tokenizer)
    assert (sample.prompt, sample.response, sample.status) == ("2+2?", "4", SampleStatus.COMPLETED)
    trained = [token for token, m in zip(sample.tokens, sample.loss_mask, strict=True) if m]
    assert tokenizer.decode(trained) == "4<|im_end|>"
    assert prepare_sft_sample(TALK[:2], "b", tokenizer).prompt == TALK[:2]
    with pytest.raises(RowError, match=r"tokens; raise max_length \(3\)"):
        prepare_sft_sample("2+2?", "4", tokenizer, max_length=3)


def test_without_a_template_prompt_and_answer_are_text():
    sample = prepare_sft_sample("2+2=", "4", make_byte_tokenizer())
    assert sample.loss_mask == [0, 0, 0, 0, 1, 1]  # "4" and the end token
    with pytest.raises(ConfigError, match="set tokenizer"):
        tokenize_conversation(TALK, make_byte_tokenizer())


USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER], "prompt": "other", "completion": "other"},
        {"prompt": "2+2?", "completion": "4"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"instruction": "2+2?", "output": "4", "input": ""},
        {"question": "2+2?", "answer": "4"},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"conversations": [USER, ANSWER]},
    ],
)
def test_rows_of_every_form_are_the_same_sample(tmp_path, row):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(row) + "\n")
    [sample] = load_sft_dataset(str(path), tokenizer=chat_tokenizer(CHATML))
    expected = prepare_sft_sample([USER], "4", chat_tokenizer(CHATML))
    expected.metadata = {"dataset": str(path), "index": 0}
    assert sample == expected
    [untokenized] = load_sft_dataset(str(path))
    assert (untokenized.tokens, untokenized.response) == ([], "4")


def test_rows_that_cannot_be_trained_are_left_out_and_counted(tmp_path, caplog):
    path = tmp_path / "chats.jsonl"
    rows = [
        {"instruction": "Add", "input": "2+2", "output": "4"},
        {"title": "x"},
        {"prompt": "2+2?", "completion": "4" * 100},
        {"prompt": "3+3?", "completion": "6"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = load_sft_dataset(str(path), tokenizer=chat_tokenizer(CHATML), max_length=80)
    assert [sample.response for sample in samples] == ["4", "6"]
    assert samples[0].prompt == [{"role": "user", "content": "Add\n\n2+2"}]
    assert [sample.metadata["index"] for sample in samples] == [0, 3]
    assert "2 rows are used" in caplog.text
    assert "1 longer than max_length=80 tokens" in caplog.text
    assert "1 of no known form (messages" in caplog.text
    assert len(load_sft_dataset(str(path), max_samples=1)) == 1
    with pytest.raises(DataError, match="no row to train on"):
        load_sft_dataset(str(path), tokenizer=chat_tokenizer(CHATML), max_length=1)
    with pytest.raises(ConfigError, match=r"max_samples \(0\)"):
        load_sft_dataset(str(path), max_samples=0)


@pytest.mark.parametrize("talk", ["hi", [{"speaker": "a"}], [USER]])
def test_a_damaged_conversation_is_an_error_that_names_the_row(tmp_path, talk):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": talk}) + "\n")
    with pytest.raises(DataError, match=r"chats.jsonl, line 1"):
        load_sft_dataset(str(path))


def test_samples_are_read_back_from_files(tmp_path):
    samples = [prepare_sft_sample("2+2?", "4", chat_tokenizer(CHATML)), prepare_sft_sample([USER], "4", chat_tokenizer(CHATML))]
    export_samples_to_jsonl(samples, tmp_path / "all.jsonl", include_tokens=True)
    assert load_samples_from_jsonl(tmp_path / "all.jsonl") == samples
    export_samples_to_jsonl(samples, tmp_path / "text.jsonl")
    [text] = load_samples_from_jsonl(tmp_path / "text.jsonl", limit=1)
    assert (text.tokens, text.response) == ([], "4")
    export_samples_to_huggingface_format(samples, tmp_path / "chats.jsonl")
    assert [row["messages"] for _, row in read_jsonl(tmp_path / "chats.jsonl")] == [[USER, ANSWER]] * 2
    again = load_sft_dataset(str(tmp_path / "chats.jsonl"), tokenizer=chat_tokenizer(CHATML))
    assert [sample.tokens for sample in again] == [sample.tokens for sample in samples]


def test_prompts_and_answers_of_a_file(tmp_path, caplog):
    path = tmp_path / "problems.jsonl"
    rows = [{"question": "2+2?", "answer": "two and two #### 4"}, {"input": "3+3?", "target": "#### 6"}, {"title": "x"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_rl_prompts(str(path)) == ["2+2?", "3+3?"]
    assert load_rl_prompts(str(path), max_prompts=1) == ["2+2?"]
    assert "1 of 3 rows are left out" in caplog.text
    found = load_dataset_with_answers(str(path), extract_answer=gsm8k_target)
    assert found == [{"prompt": "2+2?", "answer": "4"}, {"prompt": "3+3?", "answer": "6"}]
    assert load_dataset_with_answers(str(path), max_samples=1)[0]["answer"] == "two and two #### 4"
    path.write_text('{"title": "x"}\n')
    with pytest.raises(DataError, match=r"columns title; .*prompt.* .*answer"):
        load_dataset_with_answers(str(path))
