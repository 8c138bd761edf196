"""The images of rows: stored when a row is drawn, relative to the folder of the data file."""

import json

import pytest
from hostile_images import LEFT_RED, encode, picture
from hypothesis import given, strategies as st

from ludic.data import DataMixture, load_data, load_mixture
from ludic.data.dataset import MixtureEntry
from ludic.data.formats import convert_alpaca, convert_sharegpt, count_formats
from ludic.data.row_images import check_images, has_images, intern_row, list_images
from ludic.data.row_stream import RowStream
from ludic.data.sources import read_table
from ludic.errors import DataError
from ludic.images.content import image_part
from ludic.images.store import ImageStore, use_store

PNG = encode(picture(), "PNG")
OTHER = encode(picture().transpose(0), "PNG")
STORE = ImageStore()
FIRST, SECOND = STORE.add(PNG), STORE.add(OTHER)
URIS = [f"ludic-image:{digest}" for digest in (FIRST, SECOND)]
ASKED = {"type": "text", "text": "How many?"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "a.png").write_bytes(PNG)
    (tmp_path / "img" / "b.png").write_bytes(OTHER)
    return tmp_path


def intern(row, folder, store=None):
    return intern_row(row, folder, "rows.jsonl, line 7", store or ImageStore())


def user(*parts):
    return {"role": "user", "content": list(parts)}


def test_a_text_prompt_with_images_is_a_message_that_begins_with_them(folder):
    row = {"prompt": "How many?", "images": ["img/a.png", {"path": "img/b.png", "bytes": None}], "answer": "3", "completion": "3"}
    assert intern(row, folder) == {
        "prompt": [user(image_part(FIRST), image_part(SECOND), ASKED)],
        "images": URIS,
        "answer": "3",
        "completion": [{"role": "assistant", "content": "3"}],
    }
    assert row["images"][0] == "img/a.png"  # the row that was read is not changed
    one = intern({"prompt": "How many?", "image": PNG}, folder)
    assert one == {"prompt": [user(image_part(FIRST), ASKED)], "image": URIS[0], "images": URIS[:1]}


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_parts_of_messages_are_filled_or_have_their_own_image(folder, column):
    blank = [{"role": "system", "content": "Look."}, user({"type": "image"}, ASKED, {"type": "image"})]
    own = [blank[0], user({"type": "image", "image": "img/a.png"}, ASKED, {"type": "image", "path": "img/b.png"})]
    wanted = [blank[0], user(image_part(FIRST), ASKED, image_part(SECOND))]
    for row in ({column: blank, "images": ["img/a.png", "img/b.png"]}, {column: own}, {column: wanted, "images": None}):
        store = ImageStore()
        store.add(PNG), store.add(OTHER)
        interned = intern(row, folder, store)
        assert interned[column] == wanted
        assert interned["images"] == URIS
        assert intern(interned, folder, store) == interned


@given(
    st.dictionaries(
        st.sampled_from(["prompt", "messages", "answer"]),
        st.text() | st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text()})),
    )
)
def test_a_row_of_text_is_returned_as_it_is(row):
    assert intern_row(row, None, "row 1", STORE) is row
    assert not has_images(row)
    parts = {**row, "messages": [user(ASKED)], "images": [], "image": None}
    assert intern_row(parts, None, "row 1", STORE) is parts


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"images": ["img/9.png"]}, r"images\[0\] .'img/9.png'. does not exist in"),
        ({"images": ["img/a.png", "../b.png"]}, r"images\[1\] .*leaves"),
        ({"images": ["http://a.b/c.png"]}, r"images\[0\] .*not downloaded"),
        ({"image": {"path": "9.png"}}, r"images\[0\] .*does not exist"),
        ({"prompt": [user({"type": "image", "image": "9.png"})]}, r"9.png.*does not exist"),
        ({"prompt": [user({"type": "image_url", "image_url": {"url": "https://a.b"}})]}, "not downloaded"),
    ],
)
def test_files_that_are_missing_are_known_before_they_are_opened(folder, changes, match):
    row = {"prompt": "How many?", **changes}
    for refuse in (lambda: check_images(row, folder, "rows.jsonl, line 7"), lambda: intern(row, folder)):
        with pytest.raises(DataError, match=f"^rows.jsonl, line 7: .*{match}"):
            refuse()


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"images": [b"GIF89a"]}, r"images\[0\] is a damaged GIF"),
        ({"images": [b"no image"]}, r"images\[0\] is no image"),
        ({"prompt": [user(ASKED, {"type": "image"})]}, "there are no more images"),
        ({"prompt": [user({"type": "image"}, ASKED)], "images": [PNG, OTHER]}, "1 image parts and 2 images"),
        ({"prompt": [user({"type": "video_image"}, ASKED)], "images": [PNG]}, "of type 'video_image'"),
        ({"prompt": [{"role": "assistant", "content": [{"type": "image"}]}], "images": [PNG]}, "assistant"),
        ({"prompt": [{"role": "system", "content": "s"}], "images": [PNG]}, "no message of the user"),
        ({"prompt": "p", "images": [[PNG]]}, "list"),
    ],
)
def test_a_fault_names_file_and_line(folder, row, match):
    check_images(row, folder, "rows.jsonl, line 7")
    with pytest.raises(DataError, match=f"^rows.jsonl, line 7: .*{match}") as caught:
        intern({"prompt": "p", **row}, folder)
    assert str(caught.value).isprintable()


def test_a_rollout_takes_its_images_from_the_run_that_made_it(tmp_path):
    made = ImageStore(tmp_path / "images")
    made.add(PNG), made.add(OTHER)
    trace = {"prompt_token_ids": [1, 9], "completion_token_ids": [2], "images": [[FIRST, 1, 1]]}
    step = {"prev_obs": [image_part(SECOND), ASKED], "action": "3", "reward": 1, "trace": trace}
    row, store = {"steps": [step]}, ImageStore()
    assert intern(row, tmp_path, store) is row
    assert store.read(FIRST) == PNG
    assert store.has(SECOND)
    with pytest.raises(DataError, match=f"line 7: an image .'ludic-image:{FIRST}'. is not in"):
        intern(row, tmp_path / "images")


def test_sharegpt_and_alpaca_texts_have_parts_where_they_have_markers():
    turns = [
        {"from": "human", "value": "<image>What is it?"},
        {"from": "gpt", "value": "<image> is what you wrote"},
        {"from": "human", "value": "And\n<image>\nthis?"},
        {"from": "gpt", "value": "b"},
    ]
    blank = {"type": "image"}
    _, answer, *_ = converted = convert_sharegpt({"conversations": turns, "images": URIS}, "row 1")
    assert converted[0]["content"] == [blank, {"type": "text", "text": "What is it?"}]
    assert answer["content"] == "<image> is what you wrote"
    assert converted[2]["content"] == [{"type": "text", "text": "And\n"}, blank, {"type": "text", "text": "\nthis?"}]
    assert convert_sharegpt({"conversations": turns}, "row 1")[0]["content"] == "<image>What is it?"
    alpaca = {"instruction": "<image>Count.", "output": "3"}
    assert convert_alpaca({**alpaca, "images": URIS[:1]}, "row 1")[0]["content"] == [blank, {"type": "text", "text": "Count."}]
    assert convert_alpaca(alpaca, "row 1")[0]["content"] == "<image>Count."


def test_the_columns_of_images_are_read():
    rows = [("r.jsonl, line 1", {"messages": [], "images": ["a.png"]}), ("r.jsonl, line 2", {"messages": []})]
    assert count_formats(rows, "r.jsonl").describe() == "r.jsonl: 2 rows of messages (messages, images)"
    assert list_images({"image": "a.png"}) == list_images({"images": "a.png"}) == ["a.png"]


def write_rows(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_paths_are_relative_to_each_data_file(tmp_path):
    sources = []
    for name, data in (("one", PNG), ("two", OTHER)):
        sources.append(write_rows(tmp_path / name / "rows.jsonl", {"prompt": "How many?", "image": "a.png"}))
        (tmp_path / name / "a.png").write_bytes(data)
    loaded = [load_data(source) for source in sources]
    mixed = load_mixture(DataMixture([MixtureEntry(source, weight=2.0) for source in sources]))
    lazy = load_data(sources[0], kind="prompt", streaming=True)
    for data in (*loaded, mixed, lazy):
        for index, row in enumerate(data):
            digest = FIRST if "one" in data.where(index) else SECOND
            assert intern_row(row, data.table.folder_of(index), data.where(index), ImageStore())["images"] == [
                f"ludic-image:{digest}"
            ]
    with use_store(ImageStore()) as store:
        stream = RowStream(sources, shuffle=False)
        drawn = [next(stream) for _ in range(2)]
        assert [row["images"] for _, row in drawn] == [URIS[:1], URIS[1:]]
        assert store.has(FIRST)
        elsewhere = RowStream(sources[:1], image_folder=tmp_path / "two")
        assert next(elsewhere)[1]["images"] == URIS[1:]
        assert elsewhere.first(1)[0][1]["images"] == URIS[1:]


def test_reading_a_table_opens_no_image(tmp_path, monkeypatch):
    source = write_rows(tmp_path / "rows.jsonl", {"prompt": "How many?", "image": "a.png"})
    monkeypatch.setattr(ImageStore, "add", pytest.fail)
    assert read_table(source).rows[0]["image"] == "a.png"
    assert next(iter(load_data(source)))["image"] == "a.png"


@pytest.mark.parametrize("streaming", [False, True])
def test_images_of_the_datasets_library_stay_bytes_until_a_row_is_drawn(tmp_path, streaming):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "image": datasets.Image(), "images": datasets.List(datasets.Image())}
    )
    row = {"prompt": "How many?", "image": None, "images": [picture(), picture().transpose(0)]}
    datasets.Dataset.from_list([row, row], features=features).save_to_disk(tmp_path / "saved")
    loaded = load_data(str(tmp_path / "saved"), kind="prompt", streaming=streaming)
    assert loaded.digest() == load_data(str(tmp_path / "saved"), kind="prompt", streaming=streaming).digest()
    for each in loaded:
        assert isinstance(each["images"][0]["bytes"], bytes)
        assert intern_row(each, None, "row", ImageStore())["images"] == [
            f"ludic-image:{STORE.add(image)}" for image in row["images"]
        ]
    stream = RowStream([str(tmp_path / "saved")], shuffle=False)
    with use_store(ImageStore()):
        assert len(next(stream)[1]["images"]) == 2
    assert LEFT_RED.shape == (16, 24, 3)
