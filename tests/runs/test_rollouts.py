"""The batches of `ludic train` in this process: their numbers, the log, and the state."""

from types import SimpleNamespace

import pytest
from playing import ScriptedClient, play

from ludic.errors import ConfigError, RolloutError
from ludic.recipes.schema import RolloutSection
from ludic.runs.rollouts import PlayedBatches, make_engine, make_training_requests
from ludic.tasks import DigitSort
from ludic.training import EpisodicReturn
from ludic.training.rollouts.log import read_rollouts

SECTION = RolloutSection(prompts=2, group_size=2, temperature=1.0, top_p=1.0, max_new_tokens=None, concurrency=4, log_every=2)


class Failing(ScriptedClient):
    """Fails while `is_down`."""

    is_down = False

    async def complete(self, request):
        if self.is_down:
            raise OSError("the server is gone")
        return await super().complete(request)


def make_source(folder, client=None):
    task, directory = DigitSort(), SimpleNamespace(rollouts=folder / "r.jsonl", failed_episodes=folder / "f.jsonl")
    engine = make_engine(
        task, client or Failing("1"), model_name="m", system_prompt=None, failures_path=directory.failed_episodes
    )
    requests = make_training_requests(task, SECTION, seed=1)
    return PlayedBatches(SECTION, engine, requests, EpisodicReturn(), max_steps=1, directory=directory)


def take(source, number):
    return [play(source.next_batch()) for _ in range(number)]


def problems(batches):
    return [[item.meta["problem_id"] for item in batch.items] for batch in batches]


def test_batches_are_numbered_and_every_second_one_is_logged_with_its_credit(tmp_path):
    batches = take(make_source(tmp_path), 4)
    assert [batch.meta["batch_number"] for batch in batches] == [0, 1, 2, 3]
    assert all(batch.meta["generation_s"] > 0 for batch in batches)
    logged = read_rollouts(tmp_path / "r.jsonl")
    assert [rollout.meta["episode_idx"] for rollout in logged] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert all(len(rollout.meta["engine"]["credit"]) == 1 for rollout in logged)


def test_a_source_goes_on_from_its_state_and_replaces_the_lines_after_it(tmp_path):
    source = make_source(tmp_path)
    take(source, 2)
    state = source.state_dict()
    expected = problems(take(source, 2))
    resumed = make_source(tmp_path)
    resumed.load_state_dict(state)
    assert len(read_rollouts(tmp_path / "r.jsonl")) == 4
    assert problems(take(resumed, 2)) == expected
    assert [rollout.meta["episode_idx"] for rollout in read_rollouts(tmp_path / "r.jsonl")] == [0, 1, 2, 3, 8, 9, 10, 11]


def test_a_state_with_two_engines_is_read(tmp_path):
    """Versions before had an engine of their own for the batches that are logged."""
    source = make_source(tmp_path)
    take(source, 3)
    state = source.state_dict()
    del state["engine"]
    resumed = make_source(tmp_path)
    resumed.load_state_dict({**state, "engines": {"plain": {"episodes": 4}, "logged": {"episodes": 8}}})
    assert resumed.state_dict() == source.state_dict()
    resumed.load_state_dict({"batches": 2})  # the oldest ones
    assert resumed.state_dict()["engine"] == {"episodes": 0}


def test_a_state_with_a_pool_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="over-sampling or a group filter"):
        make_source(tmp_path).load_state_dict({"pool": {}, "engine": {"episodes": 0}, "requests": {"batches": 0}})


def test_the_state_after_a_failed_batch_is_the_state_before_it(tmp_path):
    client = Failing("1")
    source = make_source(tmp_path, client)
    take(source, 1)
    state = source.state_dict()
    client.is_down = True
    with pytest.raises(RolloutError, match="the server is gone"):
        take(source, 1)
    assert (tmp_path / "f.jsonl").stat().st_size > 0
    assert source.state_dict() == state
