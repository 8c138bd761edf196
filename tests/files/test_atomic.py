"""Files that are replaced atomically."""

import os

import pytest

from ludic.errors import CheckpointError
from ludic.files.atomic import read_json, write_json, write_text


def test_an_interrupted_write_leaves_the_file_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "progress.json"
    write_text(path, "first\n")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "second, and longer\n")
    assert path.read_text() == "first\n"


def test_a_file_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append("flush"))
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (order.append("rename"), rename(old, new)))
    write_json(tmp_path / "latest.json", {"step": 3})
    assert order == ["flush", "rename"]
    assert [path.name for path in tmp_path.iterdir()] == ["latest.json"]
    assert read_json(tmp_path / "latest.json") == {"step": 3}


def test_values_that_are_not_json_are_refused_on_write_and_read(tmp_path):
    path = tmp_path / "state.json"
    with pytest.raises(CheckpointError, match="plain JSON values"):
        write_json(path, {"state": object()})
    assert not path.exists()
    for text, message in (("[1]", "must hold a JSON object"), ("{", "is not JSON")):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            read_json(path)
