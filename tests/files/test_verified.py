"""Folders that were verified are read again once a file may have changed."""

import os
import time
from types import SimpleNamespace

import pytest

from ludic.files import manifest
from ludic.files.manifest import VerifiedFolders, find_faults, write_manifest


@pytest.fixture
def hour_later(monkeypatch):
    monkeypatch.setattr(manifest, "time", SimpleNamespace(time_ns=lambda: time.time_ns() + 3600 * 10**9))


def test_a_file_changed_in_place_is_read_again_though_its_time_was_put_back(tmp_path, hour_later):
    path, read = tmp_path / "weights", []
    path.write_bytes(b"1234")
    write_manifest(tmp_path, {})

    def verify(folder):
        read.append(folder)
        return find_faults(folder)

    folders = VerifiedFolders()
    assert [folders.find_faults(tmp_path, verify) for _ in range(2)] == [[], []]
    assert read == [tmp_path]
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # it counts in ticks of the system's clock
        with path.open("r+b") as file:
            file.write(b"1235")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert folders.find_faults(tmp_path, verify) == ["the content of weights has changed"]
