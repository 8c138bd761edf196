"""Demonstrations of a task with pictures, for the warm-up."""

import asyncio
from random import Random

import pytest
from image_spans import draw_picture, parts

from ludic.errors import DataError
from ludic.images.store import ImageStore, use_store
from ludic.inference.prompts.encoder import PromptEncoder
from ludic.inference.prompts.template import Dialogue
from ludic.models.images.small import make_image_tokenizer, make_small_image_config, make_small_processor
from ludic.tasks.demonstrations import DemonstrationSource
from ludic.tasks.episodic import EpisodicTask, Turn
from ludic.tasks.shapes import COVER, LOOK, QUESTION, Shapes, draw_picture as draw_shapes

TOKENIZER = make_image_tokenizer()
SHAPE = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
PROCESSOR = make_small_processor(TOKENIZER, make_small_image_config(TOKENIZER, **SHAPE))


@pytest.fixture(autouse=True)
def store():
    with use_store(ImageStore()) as used:
        yield used


class Looks(EpisodicTask):
    """Three turns, of which the first and the last show a picture."""

    max_turns = 3
    max_new_tokens = 3
    success_reward = 1.0
    reward_sees = "nothing"

    def draw(self, rng):
        return {"id": "1"}

    def demonstrations(self, count, rng):
        turns = [Turn([picture(1), "a?"], "x"), Turn("b?", "y"), Turn([{"type": "image", "image": picture(2)}], "z")]
        return [turns for _ in range(count)]

    def make_env(self, episode):
        raise NotImplementedError


def picture(seed):
    return draw_picture(seed).repeat(4, 0).repeat(4, 1)


def next_items(source):
    return asyncio.run(source.next_batch()).items


def test_a_demonstration_of_several_turns_is_one_sample_with_its_images(store):
    [first, second] = next_items(DemonstrationSource(Looks(), TOKENIZER, batch_size=2, seed=1))
    digests = [store.add(picture(seed)) for seed in (1, 2)]
    assert [span.digest for span in first.images] == digests
    messages = [
        {"role": "user", "content": parts(digests[0], "a?")},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "b?"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": parts(digests[1])},
    ]
    prompt = PromptEncoder(TOKENIZER, PROCESSOR).encode(Dialogue(messages))
    assert first.input_ids[: len(prompt.ids)] == prompt.ids
    assert first.images == prompt.images
    assert first.input_ids == second.input_ids
    trained = [token for token, mask in zip(first.input_ids, first.action_mask, strict=True) if mask]
    end = TOKENIZER.eos_token_id
    assert trained == [*TOKENIZER("x")["input_ids"], end, *TOKENIZER("y")["input_ids"], end, *TOKENIZER("z")["input_ids"], end]


def test_shapes_are_demonstrated_to_a_model_that_sees_them(store):
    task = Shapes(num_heldout=5)
    items = next_items(DemonstrationSource(task, TOKENIZER, batch_size=6, seed=1))
    problems = [turn.observation for [turn] in task.demonstrations(6, Random("demonstrations 1 0"))]
    assert [item.images[0].digest for item in items] == [store.add(observation[0]) for observation in problems]
    assert len({item.images[0].digest for item in items}) == 6
    assert all(item.images[0].length == 9 for item in items)  # 24 x 24 pixels, 8 x 8 each
    assert draw_shapes("r-disc-0.1.2").shape == (24, 24, 3)


def test_a_model_of_text_cannot_be_shown_them():
    with pytest.raises(DataError, match=r"a demonstration of Looks has images.* reads text alone"):
        next_items(DemonstrationSource(Looks(), make_image_tokenizer(), batch_size=1, seed=1))


def test_a_covered_picture_is_uncovered_row_by_row_and_then_counted():
    """Two discs, in the cells 0 and 4: rows a and b."""
    name = "r-disc-0.1.2-4.0.0"
    env, picture = Shapes(looks=True).make_env({"id": name, "question": QUESTION, "answer": "2r"}), draw_shapes(name)
    assert env.env_reset()[0] == LOOK
    shown = [env.env_step(row).obs for row in ("b", "b", "a")]
    assert [question for _, question in shown] == [LOOK, LOOK, QUESTION]
    seen = [
        [(covered[8 * row : 8 * row + 8] == picture[8 * row : 8 * row + 8]).all() for row in range(3)] for covered, _ in shown
    ]
    assert seen == [[False, True, False], [False, True, False], [True, True, False]]
    assert (shown[0][0][:8] == COVER).all()
    outcome = env.env_step("2r")
    assert (outcome.reward, outcome.terminated, outcome.info["saw_all"]) == (1.0, True, False)
    assert env.env_reset()[0] == LOOK
    for row in "abc":
        observation = env.env_step(row).obs
    assert (observation[0] == picture).all()
    assert env.env_step("3r").info["saw_all"]


def test_the_teacher_of_the_looks_often_names_a_row_twice():
    turns = Shapes(right=0.5, looks=True).demonstrations(400, Random(0))
    assert {len(each) for each in turns} == {4}
    looks = [[turn.action for turn in each[:3]] for each in turns]
    whole = sum(len(set(each)) == 3 for each in looks) / 400
    assert 0.5 < whole < 0.75  # half, and 2 of 9 of the others
