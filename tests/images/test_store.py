"""The store: bytes under their digest, in threads and processes."""

import gc
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hostile_images import LEFT_RED, encode, picture, turned
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from ludic.images.store import ImageError, ImageStore, current_store, use_store
from ludic.training.checkpoint import CheckpointConfig, CheckpointManager

PNG = encode(picture(), "PNG")


@pytest.fixture
def store(tmp_path):
    return ImageStore(tmp_path / "images")


@given(pixels=arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([3, 4]))))
def test_an_array_comes_back_with_its_alpha_over_white(pixels):
    store = ImageStore()
    seen = np.asarray(store.open(store.add(pixels)))
    alpha = pixels[:, :, 3:] / 255 if pixels.shape[2] == 4 else 1
    assert np.abs(seen - (pixels[:, :, :3] * alpha + 255 * (1 - alpha))).max() <= 1


def test_a_file_is_named_by_the_digest_of_the_bytes_as_they_were(store):
    digest = store.add(PNG)
    assert digest == hashlib.blake2b(PNG, digest_size=16).hexdigest()
    assert [str(path.relative_to(store.folder)) for path in store.folder.rglob("*.*")] == [f"{digest[:2]}/{digest}.png"]
    assert store.read(digest) == PNG
    jpeg = turned(1)
    assert store.read(store.add(jpeg)) == jpeg
    assert ImageStore(store.folder).size(digest) == (24, 16)  # found by name, in another process


def test_an_image_of_pillow_is_turned_as_its_file_would_be(store, tmp_path):
    from PIL import Image

    (tmp_path / "turned.jpg").write_bytes(turned(6))
    with Image.open(tmp_path / "turned.jpg") as image:
        digest = store.add(image)
        assert image.size == (16, 24)  # the user's image is not changed
    assert digest == store.add(tmp_path / "turned.jpg")
    assert digest == store.add(store.open(digest))
    for mode in ("L", "P", "1", "CMYK", "YCbCr", "RGBA", "LA", "I;16"):
        assert store.size(store.add(picture("L" if mode == "I;16" else mode).convert(mode))) == (24, 16)


def test_another_image_has_another_digest(store):
    other = LEFT_RED.copy()
    other[0, 0, 0] ^= 1
    assert store.add(LEFT_RED) != store.add(other)
    assert store.add(LEFT_RED) == store.add(picture())


def test_a_missing_and_a_changed_file_are_one_line(store):
    with pytest.raises(ImageError, match=f"{'0' * 32}' is not in .*images"):
        store.open("0" * 32)
    digest = store.add(PNG)
    [path] = store.folder.rglob("*.png")
    path.write_bytes(PNG[:-1] + b"\0")
    with pytest.raises(ImageError, match=f"{digest}.png was changed"):
        store.read(digest)
    path.write_bytes(PNG[:-1])
    store.add(LEFT_RED)
    store.add(picture())
    assert ImageStore(store.folder).add(PNG) == digest


def test_a_cut_file_is_written_again_when_its_image_is_added(store):
    digest = store.add(LEFT_RED)
    [path] = store.folder.rglob("*.png")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert ImageStore(store.folder).add(LEFT_RED) == digest
    assert path.read_bytes() == whole
    path.unlink()
    assert not store.has(digest)
    assert store.add(LEFT_RED) == digest
    assert store.has(digest)


def test_added_files_are_flushed_once(store, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    store.add(PNG)
    assert flushed == []
    store.flush()
    assert len(flushed) == 1
    store.flush()
    assert len(flushed) == 1


def test_a_checkpoint_flushes_the_images_that_it_names(store, monkeypatch, tmp_path):
    flushed, store_png = [], store.add(PNG)
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    with use_store(store):
        CheckpointManager(CheckpointConfig(tmp_path / "checkpoints")).write(lambda folder: None, 1, shared=False)
    [path] = store.folder.rglob(f"{store_png}.png")
    assert path.stat().st_ino in flushed


def test_a_file_that_another_process_wrote_is_flushed(store, monkeypatch):
    """As an image of an actor, which a checkpoint of the trainer names."""
    flushed, digest = [], store.add(PNG)
    monkeypatch.setattr(os, "fsync", flushed.append)
    trainer = ImageStore(store.folder)
    assert trainer.add(PNG) == digest
    trainer.flush()
    assert len(flushed) == 1


def test_images_may_be_found_while_others_are_flushed(store, monkeypatch):
    """As by the thread of a gateway, or of batches, during a checkpoint."""
    digests, trainer = [store.add(np.full((2, 2, 3), shade, np.uint8)) for shade in range(2)], ImageStore(store.folder)
    looks, flushes = threading.Event(), threading.Event()
    find = threading.Thread(target=trainer.check, args=(digests[1:],))

    def is_file(path, real=Path.is_file):
        if threading.current_thread() is find:
            looks.set()
            flushes.wait(5)
        elif not flushes.is_set():
            flushes.set()
            find.join(0.2)
        return real(path)

    trainer.check(digests[:1])
    monkeypatch.setattr(Path, "is_file", is_file)
    find.start()
    looks.wait(5)
    trainer.flush()
    find.join()
    assert all(map(trainer.has, digests))


def test_a_full_disk_leaves_no_image(store, monkeypatch):
    def fail(path, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fail)
        with pytest.raises(OSError, match="No space"):
            store.add(PNG)
    assert not list(store.folder.rglob("*.png"))
    store.add(PNG)
    assert [path.suffix for path in store.folder.rglob("*.*")] == [".png"]


def test_threads_add_and_read_the_same_images(store):
    images = [np.full((8, 8, 3), value, dtype=np.uint8) for value in range(6)]
    wanted = [ImageStore().add(image) for image in images]
    faults = []

    def work():
        for image, digest in zip(images, wanted, strict=True):
            if store.add(image) != digest or store.size(digest) != (8, 8) or not store.has(digest):
                faults.append(digest)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert len(list(store.folder.rglob("*.*"))) == 6


PROCESS = """
import sys, numpy as np
from pathlib import Path
from ludic.images.store import ImageStore
store = ImageStore(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for value in range(40):
    digest = store.add(np.full((64, 64, 3), value, dtype=np.uint8))
    assert store.size(digest) == (64, 64)
    print(digest)
"""


def test_two_processes_add_the_same_images_at_once(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    first, second = (process.communicate()[0].split() for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert first == second
    assert {path.stem for path in tmp_path.rglob("*.*")} == set(first)  # nothing unfinished is left
    assert len(set(first)) == 40


def test_a_temporary_store_goes_with_its_object_and_not_with_a_forked_process():
    store = ImageStore()
    digest, folder = store.add(PNG), store.folder
    if (child := os.fork()) == 0:
        del store
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert store.read(digest) == PNG
    del store
    gc.collect()
    assert not folder.exists()


def test_the_store_of_the_process_is_the_one_that_is_used(store):
    outer = current_store()
    with use_store(store):
        assert current_store() is store
        with pytest.raises(ZeroDivisionError), use_store(ImageStore()):
            _ = 1 / 0
        assert current_store() is store
    assert current_store() is outer


def test_pillow_is_not_imported_until_an_image_is():
    program = """
import sys
from ludic.images.content import intern_messages, intern_observation, intern_prompt, show_content
from ludic.images.store import current_store
messages = [{"role": "user", "content": "text"}]
assert intern_messages(messages, current_store()) == intern_prompt(messages, current_store()) == messages
assert intern_observation("text", current_store()) == show_content("text") == "text"
assert not current_store().has("0" * 32)
assert not {"PIL", "numpy", "torch"} & set(sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_a_temporary_store_settles_in_the_folder_of_a_run(tmp_path):
    store = ImageStore()
    digest, before = store.add(PNG), store.folder
    store.settle(tmp_path / "run" / "images")
    assert not before.exists()
    assert ImageStore(tmp_path / "run" / "images").read(digest) == store.read(digest) == PNG
    other = store.add(LEFT_RED)
    store.settle(tmp_path / "run" / "images")
    assert store.has(other)
    again = ImageStore(tmp_path / "run" / "images")
    again.settle(tmp_path / "copy")
    assert (tmp_path / "run" / "images").is_dir()  # only a temporary folder is deleted
    ImageStore().settle(tmp_path / "empty")
    assert not (tmp_path / "empty").exists()
