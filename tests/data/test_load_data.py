"""Data sets in TRL's formats: every file type, every kind, both forms. Errors name the file and
row."""

import csv
import json
import string

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ludic.data import KINDS, load_data
from ludic.data.row_stream import RowStream
from ludic.data.sources import Draw
from ludic.errors import ConfigError, DataError

USER = {"role": "user", "content": "What color is the sky?"}
BLUE = {"role": "assistant", "content": "It is blue."}
GREEN = {"role": "assistant", "content": "It is green."}

STANDARD = {
    "text": {"text": "The sky is blue."},
    "prompt": {"prompt": "The sky is"},
    "prompt_completion": {"prompt": "The sky is", "completion": " blue."},
    "preference": {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    "unpaired_preference": {"prompt": "The sky is", "completion": " green.", "label": False},
}
CONVERSATIONAL = {
    "messages": {"messages": [USER, BLUE]},
    "prompt": {"prompt": [USER]},
    "prompt_completion": {"prompt": [USER], "completion": [BLUE]},
    "preference": {"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]},
    "unpaired_preference": {"prompt": [USER], "completion": [BLUE], "label": True},
}
FORMS = [(kind, row, False) for kind, row in STANDARD.items()] + [(kind, row, True) for kind, row in CONVERSATIONAL.items()]


def write_jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path, *rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return str(path)


def test_this_table_has_every_kind():
    assert {kind for kind, _, _ in FORMS} == set(KINDS)


@pytest.mark.parametrize(("kind", "row", "conversational"), FORMS)
def test_every_kind_is_recognised_by_its_columns_in_every_file_type(tmp_path, kind, row, conversational):
    rows = [{**row, "level": 1}, {**row, "level": 2}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    sources = [write_jsonl(tmp_path / "a.jsonl", *rows), str(tmp_path / "a.json"), write_parquet(tmp_path / "a.parquet", *rows)]
    for source in sources:
        loaded = load_data(source)
        assert (loaded.kind, loaded.conversational, loaded.rows) == (kind, conversational, rows)
        assert loaded.columns == list(rows[0])


def test_a_preference_can_have_its_prompt_inside_both_answers(tmp_path):
    source = write_jsonl(tmp_path / "p.jsonl", {"chosen": [USER, BLUE], "rejected": [USER, GREEN]})
    loaded = load_data(source)
    assert (loaded.kind, loaded.conversational, len(loaded)) == ("preference", True, 1)


def test_every_csv_cell_is_text(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text('prompt,answer\n529140>,012459\n"two\nlines, ""quoted""",\u2028x\n', encoding="utf-8")
    loaded = load_data(str(path))
    assert loaded.rows == [
        {"prompt": "529140>", "answer": "012459"},
        {"prompt": 'two\nlines, "quoted"', "answer": "\u2028x"},
    ]
    assert [loaded.where(i) for i in (0, 1)] == [f"{path}, line 2", f"{path}, line 3"]


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=20)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(rows=st.lists(st.tuples(TEXT, st.text(string.printable, max_size=10)), min_size=1, max_size=5))
def test_any_text_survives_every_file_type(tmp_path, rows):
    expected = [{"prompt": prompt, "answer": answer} for prompt, answer in rows]
    with (tmp_path / "t.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "answer"])
        writer.writeheader()
        writer.writerows(expected)
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in expected), encoding="utf-8")
    for source in (tmp_path / "t.csv", tmp_path / "t.jsonl", write_parquet(tmp_path / "t.parquet", *expected)):
        assert load_data(str(source)).rows == expected


def test_blank_lines_a_byte_order_mark_and_missing_columns_are_accepted(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b", "answer": 1}\r\n')
    loaded = load_data(str(path))
    assert loaded.rows == [{"prompt": "a", "answer": None}, {"prompt": "b", "answer": 1}]
    assert loaded.where(1) == f"{path}, line 3"


def test_messages_survive_a_parquet_file(tmp_path):
    """Arrow gives every message the union of all keys."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    row = {"messages": [USER, call, {"role": "tool", "name": "look", "content": "blue"}]}
    assert load_data(write_parquet(tmp_path / "m.parquet", row)).rows == [row]


def test_a_missing_column_of_pairs_is_named_with_the_setting_that_maps_it(tmp_path):
    source = write_jsonl(tmp_path / "p.jsonl", {"prompt": "2+2?", "better": "4", "rejected": "5"})
    with pytest.raises(DataError, match=r"no column chosen for kind preference; .*columns\.chosen=COLUMN"):
        load_data(source, kind="preference")
    assert load_data(source, kind="preference", columns={"chosen": "better"}).rows[0]["chosen"] == "4"


def test_a_column_can_have_an_alias_and_keeps_its_own_name(tmp_path):
    source = write_jsonl(tmp_path / "g.jsonl", {"question": "2+2?", "answer": "#### 4"})
    for columns in ({"prompt": "question"}, {"prompt": ["problem", "question"]}):
        loaded = load_data(source, columns=columns)
        assert (loaded.kind, loaded.rows) == ("prompt", [{"question": "2+2?", "answer": "#### 4", "prompt": "2+2?"}])
    with pytest.raises(
        ConfigError,
        match=r"g\.jsonl .*'problem' or 'task'.*question, answer; .*task\.args\.",
    ):
        load_data(source, columns={"prompt": ("problem", "task")})


def test_the_kind_can_be_chosen_when_several_match(tmp_path):
    source = write_jsonl(tmp_path / "p.jsonl", STANDARD["prompt_completion"])
    assert load_data(source, kind="prompt").kind == "prompt"
    with pytest.raises(DataError, match=r"no column messages for kind messages"):
        load_data(source, kind="messages")
    with pytest.raises(ConfigError, match=r"kind \('chat'\) must be one of messages"):
        load_data(source, kind="chat")


def test_the_digest_depends_on_content_and_order(tmp_path):
    one = load_data(write_jsonl(tmp_path / "1.jsonl", {"prompt": "a"}, {"prompt": "b"}))
    same = load_data(write_parquet(tmp_path / "1.parquet", {"prompt": "a"}, {"prompt": "b"}))
    other = load_data(write_jsonl(tmp_path / "2.jsonl", {"prompt": "b"}, {"prompt": "a"}))
    assert one.digest() == same.digest() != other.digest()


# ---- invalid data
# ------------------------------------------------------------------------------------------

FAULTS = [
    ({"prompt": 5}, r"line 2: prompt .*list of messages, not int"),
    ({"question": "a"}, r"line 2: .*no 'prompt'; .*question"),
    ({"prompt": ""}, r"line 2: prompt is empty"),
    ({"prompt": [USER]}, r"line 2: prompt .*messages .*first row .*text"),
    (["prompt"], r"line 2 must be an object .*not list"),
]
MESSAGE_FAULTS = [
    ([], "messages is empty"),
    (["hello"], r"messages\[0\] .*a message .*, not str"),
    ([USER, {"role": "bot", "content": "x"}], r"role of messages\[1\] \('bot'\) .*system"),
    ([{"content": "x"}], r"the role of messages\[0\] \(None\)"),
    ([{"role": "user"}], r"content of messages\[0\] .*text, not nothing"),
    ([{"role": "assistant", "content": [{"type": "image"}]}], r"content of messages\[0\] .*text, not list"),
    ([{"role": "user", "content": ["red"]}], r"content of messages\[0\] .*text, not list"),
    ("hello", r"messages must be a list .*not str"),
]


@pytest.mark.parametrize(("row", "message"), FAULTS)
def test_the_error_of_an_invalid_row_names_it_and_the_reason(tmp_path, row, message):
    source = write_jsonl(tmp_path / "p.jsonl", {"prompt": "a"}, row)
    with pytest.raises(DataError, match=rf"p\.jsonl, {message}"):
        load_data(source)


@pytest.mark.parametrize(("messages", "message"), MESSAGE_FAULTS)
def test_the_error_of_an_invalid_message_names_it_and_the_reason(tmp_path, messages, message):
    source = write_jsonl(tmp_path / "m.jsonl", {"messages": [USER, BLUE]}, {"messages": messages})
    with pytest.raises(DataError, match=rf"m\.jsonl, line 2: .*{message}"):
        load_data(source)


def test_a_label_is_true_or_false(tmp_path):
    row = STANDARD["unpaired_preference"]
    with pytest.raises(DataError, match=r"line 2: label \(1\) .*true or false"):
        load_data(write_jsonl(tmp_path / "l.jsonl", row, {**row, "label": 1}))


def test_many_invalid_rows_are_counted_and_three_are_shown(tmp_path):
    source = write_jsonl(tmp_path / "p.jsonl", {"prompt": "a"}, *[{"prompt": n} for n in range(5)])
    with pytest.raises(DataError, match=r"line 2: .*line 3: .*line 4: [^;]*; 2 more rows"):
        load_data(source)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": \n', r"a\.jsonl, line 2 is not JSON: .*column 12"),
        ("a.jsonl", b'{"prompt": "a"}\n\xff\xfe\n', r"a\.jsonl, line 2 is not UTF-8"),
        ("a.jsonl", b"\n\n", r"a\.jsonl has no rows"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl, line 1 is nested too deeply"),
        ("a.jsonl", b'{"input": "a", "output": "b"}', r"\(input, output\) fit no format .*columns=\{'prompt': NAME\}"),
        ("a.json", b'{"prompt": "a"}', r"a\.json must hold a list of objects, not dict"),
        ("a.json", b'[\n{"prompt": }]', r"a\.json is not JSON: Expecting value at line 2, column 12"),
        ("a.json", b'[{"prompt": "a"}, 3]', r"a\.json, row 2 must be an object"),
        ("a.csv", b"prompt,answer\na,b\nc\n", r"a\.csv, line 3 .*1 .*2 columns \(prompt, answer\)"),
        ("a.csv", b"prompt,prompt\na,b\n", r"a\.csv, line 1 .*each column once"),
        ("a.csv", b'prompt\n"a\n', r"a\.csv, line 2 is not CSV: .*data"),
        ("a.csv", b"", r"a\.csv, line 1 .*column once, got \[\]"),
        ("a.parquet", b"PAR1 no more", r"a\.parquet is not a parquet file"),
        ("a.xlsx", b"", r"a\.xlsx ends .*\.csv, \.json, \.jsonl, \.ndjson, \.parquet"),
    ],
)  # fmt: skip
def test_a_file_whose_content_does_not_match_its_type_is_refused_by_name(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_data(str(tmp_path / name))


@pytest.mark.parametrize("source", ["missing.jsonl", "./missing", "/no/such/folder", "a/b/c"])
def test_a_missing_path_is_not_looked_up_on_the_hub(source):
    with pytest.raises(DataError, match=rf"{source} does not exist"):
        load_data(source)


# ---- the datasets library
# ------------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


def test_a_folder_of_files_is_read_by_the_datasets_library(tmp_path, offline):
    folder = tmp_path / "sky"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", CONVERSATIONAL["prompt"], CONVERSATIONAL["prompt"])
    write_jsonl(folder / "test.jsonl", {"prompt": [BLUE]})
    loaded = load_data(str(folder))
    assert (loaded.kind, loaded.conversational, loaded.rows) == ("prompt", True, [CONVERSATIONAL["prompt"]] * 2)
    assert loaded.where(1) == f"{folder}, row 2"
    assert load_data(str(folder), split="test").rows == [{"prompt": [BLUE]}]


def test_a_data_set_saved_to_disk_is_read(tmp_path, offline):
    rows = [{"prompt": "a", "answer": "b"}]
    offline.Dataset.from_list(rows).save_to_disk(tmp_path / "plain")
    offline.DatasetDict({"train": offline.Dataset.from_list(rows)}).save_to_disk(tmp_path / "splits")
    assert load_data(str(tmp_path / "plain")).rows == load_data(str(tmp_path / "splits")).rows == rows
    with pytest.raises(DataError, match=r"cannot load .*splits \(config None, split test\)"):
        load_data(str(tmp_path / "splits"), split="test")


def test_an_id_is_loaded_by_the_datasets_library_with_config_and_split(offline, monkeypatch):
    asked = []

    def load_dataset(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        rows = offline.Dataset.from_list([{"question": "2+2?"}])
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(offline, "load_dataset", load_dataset)
    loaded = load_data("openai/gsm8k", columns={"prompt": "question"}, config="main", split="test")
    assert loaded.where(0) == "openai/gsm8k, row 1"
    assert next(RowStream(["openai/gsm8k"])) == ("openai/gsm8k, row 1", {"question": "2+2?"})
    assert asked == [("openai/gsm8k", "main", "test", False), ("openai/gsm8k", None, "train", True)]


def test_an_id_that_cannot_be_loaded_is_a_clear_error(offline, monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(offline, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"nobody/nothing \(config None, split train\): ConnectionError"):
        load_data("nobody/nothing")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "folder"])
def test_a_limit_draws_the_same_rows_from_every_kind_of_source(tmp_path, offline, name):
    rows = [{"prompt": f"p{number}"} for number in range(50)]
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
        write_jsonl(path / "train.jsonl", *rows)
    elif name.endswith("jsonl"):
        write_jsonl(path, *rows)
    elif name.endswith("json"):
        path.write_text(json.dumps(rows))
    elif name.endswith("csv"):
        path.write_text("prompt\n" + "".join(f"{row['prompt']}\n" for row in rows))
    else:
        write_parquet(path, *rows)
    data = load_data(str(path), kind="prompt", limit=7, seed=4)
    drawn = Draw(7, seed=4).of(50)
    assert [row["prompt"] for row in data.rows] == [f"p{index}" for index in drawn]
    first = 2 if name.endswith("csv") else 1  # the header is a line too
    assert [data.table.numbers[i] for i in range(7)] == [index + first for index in drawn]


@given(st.integers(0, 200), st.none() | st.integers(1, 250), st.integers(0, 2**32))
def test_a_draw_is_ascending_without_repeats_and_within_its_limit(count, limit, seed):
    drawn = list(Draw(limit, seed).of(count))
    assert drawn == sorted(set(drawn))
    assert set(drawn) <= set(range(count))
    assert len(drawn) == min(count, count if limit is None else limit)


def test_a_limit_of_zero_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"limit \(0\) must be at least 1"):
        load_data(write_jsonl(tmp_path / "rows.jsonl", {"prompt": "a"}), limit=0)


def test_a_data_set_is_a_sequence_of_rows_with_a_one_line_repr(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(2000)))
    data = load_data(str(path))
    assert data[0] == {"prompt": "0", "answer": "0"}
    assert [row["prompt"] for row in data] == [str(n) for n in range(2000)]
    assert data[-2:] == data.rows[-2:]
    assert repr(data) == f"DataSet('{path}', kind='prompt', 2,000 rows of prompt, answer)"
