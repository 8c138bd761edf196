"""What a manifest lists."""

import pytest

from ludic.errors import CheckpointError
from ludic.files import manifest
from ludic.files.manifest import describe_file, find_faults, read_manifest, write_manifest


@pytest.fixture
def listed_late(tmp_path, monkeypatch):
    """A folder whose listing lacks the file of another process, which can be opened."""
    for name in ("first.json", "second.json"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(manifest, "_list_files", lambda folder: ["first.json"])
    return tmp_path


def test_a_file_of_another_process_that_is_listed_late_is_in_the_manifest(listed_late):
    described = {"second.json": describe_file(listed_late / "second.json")}
    write_manifest(listed_late, {"step": 1}, described=described)
    assert list(read_manifest(listed_late)["files"]) == ["first.json", "second.json"]
    (listed_late / "second.json").unlink()
    assert find_faults(listed_late) == ["second.json is missing"]


def test_a_file_of_another_process_that_is_not_there_is_refused(listed_late):
    described = {"third.json": describe_file(listed_late / "second.json")}
    with pytest.raises(CheckpointError, match=r"third\.json has None bytes, not the 11"):
        write_manifest(listed_late, {"step": 1}, described=described)
