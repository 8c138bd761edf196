"""The content of messages: what users write, and the one form inside the library."""

import base64
import json

import pytest
from hostile_images import LEFT_RED, encode, picture
from hypothesis import given, strategies as st

from ludic.errors import DataError
from ludic.images.content import (
    find_digests,
    find_message_digests,
    image_part,
    intern_messages,
    intern_observation,
    intern_prompt,
    show_content,
    to_openai,
)
from ludic.images.store import ImageError, ImageStore, use_store

PNG = encode(picture(), "PNG")
DATA_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
STORE = ImageStore()
DIGEST = STORE.add(PNG)
OTHER = STORE.add(LEFT_RED[:8])
TEXT = {"type": "text", "text": "How many?"}


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": picture()},
        {"type": "image", "image": LEFT_RED},
        {"type": "image", "image": PNG},
        {"type": "image", "image": DATA_URL},
        {"type": "image", "image": {"bytes": PNG, "path": None}},
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "a.png", "text": None},
        {"type": "image", "url": "file:a.png"},
        {"type": "image", "base64": DATA_URL.partition(",")[2]},
        {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}},
        {"type": "image_url", "image_url": DATA_URL},
        {"type": "input_image", "image_url": DATA_URL},
        {"type": "image", "image": f"ludic-image:{DIGEST}"},
    ],
)
def test_each_form_of_a_part_becomes_the_digest(part, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    given_messages = [{"role": "system", "content": "Look."}, *user({**part}, TEXT)]
    before = repr(given_messages)
    interned = intern_messages(given_messages, STORE, base=tmp_path)
    assert interned == [{"role": "system", "content": "Look."}, *user(image_part(interned_digest(interned)), TEXT)]
    assert STORE.open(interned_digest(interned)).tobytes() == picture().tobytes()
    assert json.loads(json.dumps(interned)) == interned
    assert intern_messages(interned, STORE) == interned
    assert repr(given_messages) == before  # of the user, and not changed


def interned_digest(messages):
    [digest] = find_message_digests(messages)
    return digest


@given(kinds=st.lists(st.lists(st.sampled_from(["image", "text"]), max_size=4), max_size=3), extra=st.integers(-2, 2))
def test_the_images_of_a_column_fill_the_parts_in_order(kinds, extra):
    messages = [{"role": "user", "content": [{"type": kind, "text": f"{kind}"} for kind in message]} for message in kinds]
    places = sum(message.count("image") for message in kinds)
    images = [picture(), LEFT_RED[:8]] * 8
    images = images[: max(0, places + extra)]
    if len(images) != places:
        with pytest.raises(DataError, match=r"^rows.jsonl, line 3: .*(no more images|images; there must be)"):
            intern_messages(messages, STORE, images=images, where="rows.jsonl, line 3: ")
        return
    interned = intern_messages(messages, STORE, images=images)
    assert find_message_digests(interned) == ([DIGEST, OTHER] * 8)[:places]
    shown = ["".join("text" if kind == "text" else "I" for kind in message) for message in kinds]
    assert [
        "".join("I" if each["type"] == "image" else each["text"] for each in parts_of(message)) for message in interned
    ] == shown


def parts_of(message):
    content = message["content"]
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def test_content_without_an_image_is_text(tmp_path):
    assert intern_messages(user(TEXT, {"type": "input_text", "text": " Two?"}), STORE) == [
        {"role": "user", "content": "How many? Two?"}
    ]
    plain = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": None, "tool_calls": [{}]}]
    assert intern_messages(plain, STORE) == plain
    assert intern_messages(plain, STORE)[0] is plain[0]  # text takes no copy
    assert intern_prompt("2+2", STORE) == "2+2"


def test_a_text_with_images_is_a_message_of_the_user_that_begins_with_them():
    wanted = [image_part(DIGEST), image_part(OTHER), TEXT]
    images = [PNG, LEFT_RED[:8]]
    assert intern_prompt("How many?", STORE, images=images) == user(*wanted)
    system = {"role": "system", "content": "Look."}
    answer = {"role": "assistant", "content": "Two"}
    prompt = [system, {"role": "user", "content": "How many?"}, answer, {"role": "user", "content": "Sure?"}]
    assert intern_prompt(prompt, STORE, images=images) == [system, *user(*wanted), answer, prompt[3]]
    with pytest.raises(DataError, match="2 images and no message"):
        intern_prompt([system], STORE, images=images)
    placed = intern_prompt([system, *user(TEXT, {"type": "image"})], STORE, images=[PNG])
    assert placed == [system, *user(TEXT, image_part(DIGEST))]


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ("text", r"message 0: part 1 is 'text'; a part"),
        (None, "part 1 is None"),
        ({"type": "video"}, "of type 'video'"),
        ({"text": "no type"}, "of type None"),
        ({"type": "text"}, "part 1 has the text None"),
        ({"type": "text", "text": ["a"]}, r"the text .'a'.; it"),
        ({"type": "image"}, "part 1 is an image, and there are no more"),
        ({"type": "image", "image": "a.png"}, "part 1 .*give the bytes"),
        ({"type": "image_url", "image_url": {"url": "http://a.b/c.png"}}, "not downloaded"),
        ({"type": "image", "image": "ludic-image:" + "0" * 32}, "ludic-image:0000.*not in"),
        ({"type": "image", "image": "ludic-image:../../etc/passwd"}, "not in"),
        ({"type": "image", "image": b"GIF89a"}, "message 0: part 1 is a damaged GIF"),
        ({"type": "image", "image": {"type": "image"}}, "neither bytes nor a path"),
    ],
)
def test_a_part_that_is_neither_text_nor_image_is_one_line(part, match):
    with pytest.raises(DataError, match=f"^rows.jsonl, line 3: .*{match}") as caught:
        intern_messages(user(TEXT, part), STORE, where="rows.jsonl, line 3: ")
    assert str(caught.value).isprintable()


def test_an_observation_is_text_an_image_or_a_list_of_them():
    image = image_part(DIGEST)
    assert intern_observation("2+2", STORE) == "2+2"
    for shown in (PNG, {"bytes": PNG}, [PNG], (image,), [{"type": "image", "image": PNG}]):
        assert intern_observation(shown, STORE) == [image]
    assert intern_observation(["Look: ", PNG, TEXT, LEFT_RED[:8]], STORE) == [
        {"type": "text", "text": "Look: "},
        image,
        TEXT,
        image_part(OTHER),
    ]
    assert intern_observation(["a", TEXT], STORE) == "aHow many?"
    assert intern_observation([], STORE) == ""
    for wrong, match in (
        (None, "part 0 is None"),
        (3, "part 0 .int"),
        ([1.5], "float"),
        ({"a": 1}, "neither bytes"),
        ([[PNG]], "list"),
    ):
        with pytest.raises(DataError, match=f"^an observation: .*{match}"):
            intern_observation(wrong, STORE)


def test_content_is_shown_with_the_size_of_images_that_are_known():
    content = [{"type": "text", "text": "Look: "}, image_part(DIGEST), image_part("f" * 32), TEXT]
    with use_store(STORE):
        assert show_content(content) == f"Look: [image 24x16 {DIGEST[:8]}...][image ffffffff...]How many?"
    with use_store(ImageStore()):
        assert show_content(content[:2]) == f"Look: [image {DIGEST[:8]}...]"
    assert (show_content("text"), show_content(None)) == ("text", "")


def test_digests_are_found_in_order():
    content = [image_part(OTHER), TEXT, image_part(DIGEST), image_part(OTHER)]
    assert find_digests(content) == [OTHER, DIGEST, OTHER]
    assert find_message_digests([{"role": "user", "content": content}, {"role": "tool", "content": "x"}, {"role": "user"}]) == [
        OTHER,
        DIGEST,
        OTHER,
    ]
    assert find_digests("ludic-image:" + DIGEST) == []


def test_an_image_that_is_refused_is_an_error_of_data():
    assert issubclass(ImageError, DataError)


def test_stored_images_become_data_urls_for_servers_and_the_rest_stays():
    given = {"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}
    messages = [{"role": "system", "content": "Look."}, *user(image_part(DIGEST), TEXT, given)]
    shown = to_openai(messages, STORE)
    url = {"type": "image_url", "image_url": {"url": DATA_URL}}
    assert shown == [messages[0], *user(url, TEXT, given)]
    assert intern_messages(user(url, TEXT), STORE) == user(image_part(DIGEST), TEXT)
