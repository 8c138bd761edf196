"""Files that are offered as images: each is one line of an error, or its pixels."""

import base64
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hostile_images import LEFT_RED, encode, noise, picture, png, read_files, refused_files
from hypothesis import given, strategies as st

from ludic.images.store import MAX_PIXELS, ImageError, ImageStore

REFUSED, READ = refused_files(), read_files()


@pytest.fixture
def store(tmp_path):
    return ImageStore(tmp_path / "images")


OPENED = []
"""Paths of all files that were opened."""
sys.addaudithook(lambda event, arguments: OPENED.append(str(arguments[0])) if event == "open" else None)


def add_refused(store, source, match, **keywords):
    with pytest.raises(ImageError, match=match) as caught:
        store.add(source, name="rows.jsonl, line 7: images[0]", **keywords)
    message = str(caught.value)
    assert message.startswith("rows.jsonl, line 7: images[0]"), message
    assert message.isprintable(), message  # one line
    assert len(message) < 500, message
    assert not list(store.folder.rglob("*.*"))


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_no_image_is_one_line(store, name, tmp_path):
    data, match = REFUSED[name]
    add_refused(store, data, match)
    (tmp_path / "offered").write_bytes(data)
    add_refused(store, "offered", match, base=tmp_path)


@pytest.mark.parametrize("name", READ)
def test_a_file_has_the_right_pixels(store, name):
    data, pixels = READ[name]
    digest = store.add(data)
    seen = np.asarray(store.open(digest)).astype(int)
    assert store.size(digest) == (seen.shape[1], seen.shape[0])
    assert seen.shape == pixels.shape
    assert np.abs(seen - pixels.astype(int)).mean() <= (3 if name.endswith("jpg") else 0)


@pytest.mark.parametrize("name", READ)
def test_what_is_stored_is_stored_unchanged_when_it_is_added_again(store, tmp_path, name):
    digest = store.add(READ[name][0])
    assert ImageStore(tmp_path / "other").add(store.read(digest)) == digest


def add_or_refuse(store, data):
    """Add an image and open it; an error must be one line, which is returned. The error itself is
    not kept: its traceback has the image, for whose pixels a reader may have taken gigabytes."""
    try:
        store.open(store.add(data))
    except ImageError as error:
        message = str(error)
    else:
        message = ""
    assert not message or message.isprintable()
    return message


def header_of(kind, width, height):
    """A file whose header tells this size, behind which are fewer pixels."""
    data = bytearray(noise(kind))
    start, form, size = {
        "GIF": (6, "<HH", (width, height)),
        "JPEG": (data.find(b"\xff\xc0") + 5, ">HH", (height, width)),
        "WEBP": (26, "<HH", (width, height)),
        "PNG": (0, "", ()),
    }[kind]
    data[start : start + struct.calcsize(form)] = struct.pack(form, *size)
    return png(width, height) if kind == "PNG" else bytes(data)


@pytest.mark.parametrize("kind", ["GIF", "JPEG", "PNG", "WEBP"])
@given(data=st.data())
def test_a_header_of_too_many_pixels_is_refused_by_its_size(kind, data):
    largest = 2**14 - 1 if kind == "WEBP" else 2**16 - 1
    width = data.draw(st.integers(MAX_PIXELS // largest + 1, largest))
    height = data.draw(st.integers(MAX_PIXELS // width + 1, largest))
    message = add_or_refuse(ImageStore(), header_of(kind, width, height))
    assert re.search(rf"{width}x{height} .*limit is 64|Image size .*limit", message)


def test_every_prefix_of_a_file_is_read_or_refused_in_one_line(store):
    for name in ("plain.png", "turned 3.jpg", "plain.webp", "plain.gif", "plain.bmp"):
        data = READ[name][0]
        for length in range(0, len(data), max(1, len(data) // 60)):
            add_or_refuse(store, data[:length])


def test_a_flipped_bit_is_read_or_refused_in_one_line(store):
    rng = np.random.default_rng(1)
    for name in ("plain.png", "turned 3.jpg", "plain.webp", "animated.gif", "plain.bmp", "clear palette.png"):
        for _ in range(60):
            data = bytearray(READ[name][0])
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
            add_or_refuse(store, bytes(data))


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("../../../../../../etc/passwd", "leaves .*image_folder"),
        ("/etc/passwd", "leaves"),
        ("file:///etc/passwd", "leaves"),
        ("file:%2e%2e/secret.png", "leaves"),
        ("~root/a.png", "does not exist"),
        ("link.png", "leaves"),
        ("folder", "does not exist"),
        ("loop.png", "cannot be read|does not exist"),
        ("", "does not exist"),
        ("missing.png", r"'missing.png'. does not exist in"),
        ("a\x00b.png", "cannot be read"),
        ("a\nb.png", "does not exist"),
        ("a" * 5000, "cannot be read|does not exist"),
        ("http://a.b/c.png", "URL; images are not downloaded"),
        ("HTTPS://a.b/c.png", "not downloaded"),
        ("s3://bucket/c.png", "not downloaded"),
        ("data:image/png;base64", "must be a URL such as data:"),
        ("data:image/png,abc", "must be a URL such as data:"),
        ("data:image/png;base64,@@@@", "base64 is damaged"),
        ("data:image/png;base64,abc", "base64 is damaged"),
        ("data:image/png;base64,", "no image that can be read"),
        (None, "NoneType"),
        (7, "int"),
        ({}, "neither bytes nor a path; it has nothing"),
        ({"bytes": None, "path": None}, "neither bytes nor a path"),
        ({"bytes": {"bytes": b""}}, "neither bytes nor a path"),
        ({"path": "../secret.png", "bytes": None}, "leaves"),
        (np.zeros((4, 4, 3)), r"float64 \[4, 4, 3\]"),
        (np.zeros((3, 4, 8), dtype=np.uint8), r"uint8 \[3, 4, 8\]"),
        (np.zeros((0, 4, 3), dtype=np.uint8), "no pixels"),
        ([1, 2], "list"),
    ],
)
def test_no_file_outside_of_the_folder_is_opened(store, tmp_path, source, match):
    folder = tmp_path / "data"
    (folder / "folder").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(encode(picture(), "PNG"))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    OPENED.clear()
    add_refused(store, source, match, base=folder)
    assert not [path for path in OPENED if path.endswith(("passwd", "secret.png"))]


def test_a_path_inside_of_the_folder_is_read_in_each_form(store, tmp_path):
    (tmp_path / "a folder").mkdir()
    data = encode(picture(), "PNG")
    (tmp_path / "a folder" / "a.png").write_bytes(data)
    (tmp_path / "link.png").symlink_to(tmp_path / "a folder" / "a.png")
    forms = ["a folder/a.png", "a folder/../link.png", str(tmp_path / "a folder/a.png"), {"path": "link.png", "bytes": None}]
    forms += [f"file://{tmp_path}/a%20folder/a.png", "file:link.png", tmp_path / "link.png"]
    digests = {store.add(form, base=tmp_path) for form in forms}
    assert digests == {store.add(data)} == {store.add("data:image/png;base64," + base64.b64encode(data).decode())}
    assert store.add(str(tmp_path / "link.png"), base=Path("/")) in digests
    assert str((tmp_path / "a folder" / "a.png").resolve()) in OPENED


def test_text_names_a_file_only_in_a_folder_of_data(store, tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(encode(picture(), "PNG"))
    monkeypatch.chdir(tmp_path)
    add_refused(store, "a.png", "give the bytes")


def test_a_device_or_a_pipe_is_not_read(store, tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    add_refused(store, "pipe.png", "does not exist", base=tmp_path)
    add_refused(store, "dev/zero", "does not exist", base=Path("/"))


def test_files_and_pixels_have_limits(store, tmp_path, monkeypatch):
    monkeypatch.setattr("ludic.images.store.MAX_FILE_MB", 0.001)
    monkeypatch.setattr("ludic.images.store.MAX_PIXELS", 24 * 16 - 1)
    (tmp_path / "large.png").write_bytes(bytes(1001))
    for source in (bytes(1001), "large.png", "data:image/png;base64," + "A" * 1400):
        add_refused(store, source, "MB, the limit is 0.001; make it smaller", base=tmp_path)
    for source in (encode(picture(), "PNG"), picture(), LEFT_RED):
        add_refused(store, source, "24x16 .*limit.* smaller")


def test_a_digest_that_is_a_path_names_no_file(store, tmp_path):
    store.folder.mkdir()
    (tmp_path / "secret.png").write_bytes(encode(picture(), "PNG"))
    for digest in ("../secret", "/" + str(tmp_path / "secret"), "a" * 31, "A" * 32, "", None, 7):
        assert not store.has(digest)
        with pytest.raises(ImageError, match="not in"):
            store.read(digest)


PROGRAM = """
import resource, sys
from hostile_images import refused_files, read_files
from ludic.images.store import ImageError, ImageStore
files = {**refused_files(), **read_files()}
store = ImageStore()
store.add(files["plain.png"][0])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name, (data, _) in files.items():
    try:
        store.open(store.add(data))
    except ImageError:
        pass
    print(name, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_all_files_together_take_less_than_200_mb():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 100 * 1024, done.stdout
