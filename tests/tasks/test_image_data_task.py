"""A task of rows with images: what is held out, what the model is shown, and what rewards see."""

import asyncio
import json

import numpy as np
import pytest
from hostile_images import encode, picture
from image_spans import draw_picture, parts
from PIL import Image
from playing import ScriptedClient, play, protocol

from ludic.errors import ConfigError, DataError
from ludic.images.content import find_message_digests
from ludic.images.store import ImageStore, use_store
from ludic.tasks.data_task import DataTask, TaskData
from ludic.training.reward_functions import RewardFunctions

SEEN = []


def brightness(completions, images, **columns):
    """Rewards the mean of the first picture."""
    SEEN.append(images)
    return [float(np.asarray(pictures[0]).mean()) for pictures in images]


def counts_columns(completions, **columns):
    SEEN.append(columns["images"])
    return [float(len(images)) for images in columns["images"]]


@pytest.fixture(autouse=True)
def store():
    with use_store(ImageStore()) as used:
        yield used


def write(folder, rows, pictures=20):
    (folder / "img").mkdir(exist_ok=True)
    for number in range(pictures):
        Image.fromarray(draw_picture(number)).save(folder / "img" / f"{number}.png")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def rows(count=20, **columns):
    return [{"prompt": "How many?", "images": [f"img/{number}.png"], "answer": str(number), **columns} for number in range(count)]


@pytest.mark.parametrize("streaming", [False, True])
def test_prompts_with_other_images_are_other_prompts(tmp_path, store, streaming):
    """All have the same text."""
    task = DataTask(
        TaskData(write(tmp_path, rows()), num_heldout=5, streaming=streaming),
        f"{__name__}:brightness",
    )
    held, trained = ({problem["answer"] for problem in part} for part in (task.heldout(), task.training))
    assert (len(held), len(trained), held & trained) == (5, 15, set())
    again = DataTask(TaskData(write(tmp_path, rows()[::-1]), num_heldout=5), f"{__name__}:brightness")
    assert {problem["answer"] for problem in again.heldout()} == held  # the same for any order
    assert not list(store.folder.rglob("*.png"))  # nothing was opened yet


def test_the_model_sees_the_picture_and_the_reward_function_too(tmp_path, store):
    task = DataTask(write(tmp_path, rows()), f"{__name__}:brightness")
    client, rollouts = ScriptedClient("3"), []
    for problem in task.training[:3]:
        played = play(protocol(client).run(env=task.make_env(problem), max_steps=1))
        rollouts += played
        digest = store.add(draw_picture(int(problem["answer"])))
        assert client.requests[-1].messages == [{"role": "user", "content": parts(digest, "How many?")}]
        assert played[0].steps[0].prev_obs == parts(digest, "How many?")
        assert problem["question"] == "How many?"
        row = played[0].steps[-1].info["row"]
        assert json.loads(json.dumps(row)) == row
        assert row["images"] == [f"ludic-image:{digest}"]
    SEEN.clear()
    assert asyncio.run(task.training_scorer.score(rollouts)) == {}
    wanted = [draw_picture(int(problem["answer"])).mean() for problem in task.training[:3]]
    assert [rollout.total_reward for rollout in rollouts] == pytest.approx(wanted)
    assert len(set(wanted)) == 3
    assert len(SEEN[0]) == 3
    with use_store(ImageStore()):
        errors = asyncio.run(RewardFunctions(brightness).score(rollouts))
    assert len(errors) == 3
    assert all("is not in" in str(error) for error in errors.values())


def test_images_are_opened_only_for_a_function_that_names_them(tmp_path, monkeypatch):
    task = DataTask(write(tmp_path, rows()), f"{__name__}:counts_columns")
    rollouts = play(protocol(ScriptedClient("3")).run(env=task.make_env(task.training[0]), max_steps=1))
    monkeypatch.setattr(ImageStore, "open", pytest.fail)
    assert asyncio.run(task.training_scorer.score(rollouts)) == {}
    assert rollouts[0].total_reward == 1.0


def test_parts_and_a_single_image_are_shown(tmp_path, store):
    blank = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "How many in "}, {"type": "image"}, {"type": "text", "text": "?"}]},
    ]
    given = [{"prompt": blank, "image": f"img/{number}.png", "answer": str(number)} for number in range(4)]
    task = DataTask(TaskData(write(tmp_path, given), num_heldout=1), f"{__name__}:brightness")
    problem = task.training[0]
    assert problem["question"] == "How many in ?"
    env = task.make_env(problem)
    obs, info = env.env_reset()
    digest = store.add(draw_picture(int(problem["answer"])))
    assert obs == parts("How many in ", digest, "?")
    assert find_message_digests(info["messages"]) == [digest]
    assert env.sample["image"] == f"ludic-image:{digest}"


def test_missing_files_are_known_before_the_run(tmp_path):
    source = write(tmp_path, [*rows(), {"prompt": "p", "images": ["img/0.png", "img/9999.png"], "answer": "1"}])
    with pytest.raises(DataError, match=r"rows.jsonl, line 21: images\[1\] .'img/9999.png'. does not exist in"):
        DataTask(source, f"{__name__}:brightness")
    DataTask(TaskData(source, streaming=True), f"{__name__}:brightness")  # known when the row is drawn


def test_paths_may_be_relative_to_another_folder(tmp_path, store):
    source = write(tmp_path, rows())
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "img").rename(moved / "img")
    with pytest.raises(DataError, match="does not exist"):
        DataTask(source, f"{__name__}:brightness")
    task = DataTask(TaskData(source, image_folder=str(moved)), f"{__name__}:brightness")
    assert task.make_env(task.training[0]).env_reset()[0][0]["type"] == "image"


def test_a_damaged_image_fails_its_episode_with_file_and_line(tmp_path):
    source = write(tmp_path, rows())
    task = DataTask(source, f"{__name__}:brightness")
    problem = task.training[0]
    (tmp_path / "img" / f"{problem['answer']}.png").write_bytes(encode(picture(), "PNG")[:-30])
    with pytest.raises(DataError, match=rf"rows.jsonl, line {int(problem['answer']) + 1}: images\[0\] is a damaged PNG"):
        task.make_env(problem)


def test_a_function_of_images_needs_rows_with_images(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}", "answer": "1"}) + "\n" for n in range(20)))
    with pytest.raises(ConfigError, match="images"):
        DataTask(str(path), f"{__name__}:brightness")
