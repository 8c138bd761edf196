"""Images of episodes on the page of `ludic view`: as text, and as thumbnails."""

import base64
import hashlib
import io
import json
import re
from importlib.resources import files

import numpy as np
import pytest
from image_spans import parts
from PIL import Image
from run_folders import log_rollouts, make_rollout, make_run

from ludic.images.store import ImageStore, current_store
from ludic.runs.reading import read_run
from ludic.runs.view.page import MAX_PICTURES, SCRIPTS, build_page, collect


def draw(number, width=24, height=24):
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def log_images(run, pictures, *, answers=1):
    """Log `answers` episodes for each picture, which are in the run's store. Returns digests."""
    store = ImageStore(run / "images")
    digests = [store.add(picture) for picture in pictures]
    shown = [parts(digest, "How many?") for digest in digests for _ in range(answers)]
    log_rollouts(run, [make_rollout(number, prompt=prompt) for number, prompt in enumerate(shown)])
    return digests


def test_each_image_is_words_in_the_text_and_one_thumbnail(tmp_path):
    run = make_run(tmp_path / "run")
    [small, large] = log_images(run, [draw(1), draw(2, 600, 300)], answers=4)
    data = collect([read_run(run)], episodes=100)
    words = [f"[image 24x24 {small[:8]}...]", f"[image 600x300 {large[:8]}...]"]
    assert [row[6][0][0] for row in data["episodes"]] == [f"{word}How many?" for word in words for _ in range(4)]
    assert list(data["pictures"]) == words
    sizes = []
    for url in data["pictures"].values():
        head, body = url.split(",")
        assert head == "data:image/jpeg;base64"
        sizes.append(Image.open(io.BytesIO(base64.b64decode(body))).size)
    assert sizes == [(24, 24), (256, 128)]
    page = build_page([read_run(run)], episodes=100)
    assert all(page.count(url) == 1 for url in data["pictures"].values())
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]
    assert "showPictures" in script
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in page  # the policy allows it


def test_a_page_of_text_is_the_page_that_it_was(tmp_path):
    run = make_run(tmp_path / "run")
    log_rollouts(run, [make_rollout(1, prompt="[image 24x24 3fa91c07...]"), make_rollout(2)])
    page, data = build_page([read_run(run)], episodes=10), collect([read_run(run)], episodes=10)
    assert "pictures" not in data
    assert "showPictures" not in page
    assets = files("ludic.runs.view") / "assets"
    script = "(() => {\n'use strict';\n" + "".join((assets / name).read_text() for name in SCRIPTS) + "})();\n"
    assert f"<script>{script}</script>" in page
    assert not (run / "images").exists()


def test_at_most_200_pictures_are_shown_and_the_page_stays_small(tmp_path):
    run = make_run(tmp_path / "run")
    pictures = [draw(number, 64, 64) for number in range(MAX_PICTURES + 5)]
    log_images(run, pictures)
    data = collect([read_run(run)], episodes=1000)
    assert len(data["pictures"]) == MAX_PICTURES
    assert len(data["episodes"]) == MAX_PICTURES + 5
    assert len(json.dumps(data)) < 20e6


def test_images_that_are_gone_or_damaged_are_text(tmp_path):
    run = make_run(tmp_path / "run")
    gone, damaged = log_images(run, [draw(1), draw(2)])
    store = ImageStore(run / "images")
    store._find(gone).unlink()
    store._find(damaged).write_bytes(b"\x89PNG")
    data = collect([read_run(run)], episodes=10)
    assert [row[6][0][0] for row in data["episodes"]] == [f"[image {digest[:8]}...]How many?" for digest in (gone, damaged)]
    assert "pictures" not in data


def test_each_run_has_its_own_images(tmp_path):
    runs = [make_run(tmp_path / name) for name in "ab"]
    digests = [log_images(run, [draw(number)])[0] for number, run in enumerate(runs)]
    before = current_store()
    data = collect([read_run(run) for run in runs], episodes=10)
    assert [text[13:21] for text in data["pictures"]] == [digest[:8] for digest in digests]
    assert current_store() is before


@pytest.mark.parametrize("hostile", ["</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>'])
def test_a_digest_that_is_no_digest_is_no_picture(tmp_path, hostile):
    run = make_run(tmp_path / "run")
    log_rollouts(
        run, [make_rollout(1, prompt=[{"type": "image", "image": f"ludic-image:{hostile}"}, {"type": "text", "text": hostile}])]
    )
    page = build_page([read_run(run)], episodes=10)
    assert "<script>alert" not in page
    assert "<img src=x" not in page
