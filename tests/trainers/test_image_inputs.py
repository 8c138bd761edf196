"""Rows of Python objects with images: they are written with a store next to them."""

import numpy as np
import pytest
from hostile_images import encode, picture
from image_spans import draw_picture

from ludic.data import load_data
from ludic.data.row_images import intern_row
from ludic.errors import DataError
from ludic.images.store import ImageStore
from ludic.trainers.inputs import source_of


def test_images_of_rows_are_written_once_and_found_again(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(encode(picture(), "PNG"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
    kinds = [
        picture(),
        "a.png",
        np.asarray(picture()),
        encode(picture(), "PNG"),
        {"bytes": encode(picture(), "BMP"), "path": None},
    ]
    rows = [{"prompt": [message], "images": [kind], "answer": str(number)} for number, kind in enumerate(kinds)]
    rows.append({"prompt": [message], "image": draw_picture(1), "answer": "other"})
    source = source_of(rows, folder)
    assert source == source_of(rows, folder)
    loaded = load_data(source)
    store = ImageStore()
    drawn = [intern_row(row, loaded.table.folder_of(index), loaded.where(index), store) for index, row in enumerate(loaded)]
    digest, other = store.add(picture()), store.add(draw_picture(1))
    assert [row["images"] for row in drawn] == [[f"ludic-image:{digest}"]] * 5 + [[f"ludic-image:{other}"]]
    assert sorted(path.stem for path in (folder / "images").rglob("*.*")) == sorted([digest, other])
    assert store.read(digest) == encode(picture(), "PNG")


def test_rows_of_text_make_no_folder_of_images(tmp_path):
    source_of([{"prompt": "2+2=", "answer": "4"}], tmp_path)
    assert not (tmp_path / "images").exists()


def test_a_fault_names_the_row(tmp_path):
    with pytest.raises(DataError, match=r"^row 1 of the data: images\[0\] is no image"):
        source_of([{"prompt": "a"}, {"prompt": "b", "images": [b"no image"]}], tmp_path)
