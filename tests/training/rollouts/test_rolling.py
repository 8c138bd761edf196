"""Batches of a pool of groups that an engine plays: what is trained, refilled, lost and resumed."""

import asyncio
import json
import weakref
from random import Random

import pytest
from hypothesis import given, strategies as st
from jumping_loop import play_jumping
from playing import FOR_RL, protocol
from state_edits import edit

from ludic.envs import SingleAgentEnv
from ludic.errors import ConfigError, ConfigTypeError, RequestsExhausted, RolloutAborted, RolloutError
from ludic.inference.request import derive_seed
from ludic.training import (
    EnvSpec,
    EpisodicReturn,
    ProtocolSpec,
    RollingBatchSource,
    RolloutBatchSource,
    RolloutEngine,
    RolloutRequest,
    make_dataset_sequence_requests_fn,
)
from ludic.training.reward_functions import RewardFunctions, WrongLength
from ludic.training.rollouts.group_filters import check_reward_nonzero_std, of_rollouts
from ludic.types import ChatResponse, StepOutcome


class SeededClient:
    """Answers 0 or 1 after up to three seconds; both follow from the seed of the request."""

    def __init__(self):
        self.running = self.most_running = 0

    async def complete(self, request):
        drawn = derive_seed(request.seed, 1)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(3 * (drawn % 1000 / 1000) ** 4)
        finally:
            self.running -= 1
        text = str(int(drawn // 1000 % 4 > 0))
        return ChatResponse(text, [100 + int(text)], [-0.5], "stop", [1, request.seed]), {}


class Parity(SingleAgentEnv):
    """Rewards the parity of the sample. Samples in `broken` cannot be played."""

    broken: frozenset[int] = frozenset()

    def __init__(self, sample):
        super().__init__()
        self.sample = sample

    def env_reset(self, *, seed=None):
        if self.sample in self.broken:
            raise OSError("the game is broken")
        return f"parity of {self.sample}?", {}

    def env_step(self, action):
        return StepOutcome("", float(action == str(self.sample % 2)), False, True, {})

    def env_current_obs(self):
        return ""


def make_engine(client=None, env=Parity, **settings):
    client = client or SeededClient()
    return RolloutEngine(env_registry={"parity": env}, protocol_registry={"p": lambda: protocol(client)}, **settings)


def make_requests(number=20, *, batch_size=3, group_size=1):
    return make_dataset_sequence_requests_fn(
        range(number),
        batch_size=batch_size,
        env_kind="parity",
        protocol_kind="p",
        inference=FOR_RL,
        sampling_seed_fn=lambda index, sample: 1000 * index,
        request_meta_fn=lambda index, sample: {"prompt": index},
        group_size=group_size,
        shuffle=True,
    )


def make_source(engine=None, requests=None, **settings):
    defaults = {"groups_per_batch": 2, "group_size": 4, "credit_assigner": EpisodicReturn(), "concurrency": 64}
    return RollingBatchSource(engine=engine or make_engine(), requests=requests or make_requests(), **{**defaults, **settings})


DIFFERENT = of_rollouts(check_reward_nonzero_std)


def content(batch):
    """What is trained: without ids and times."""
    return [(item.input_ids, item.action_mask, item.weight, item.meta["request_meta"]["prompt"]) for item in batch.items]


def prompts_of(batch):
    """The prompt of each group."""
    return [item.meta["request_meta"]["prompt"] for item in batch.items[::4]]


async def take(source, number):
    batches = [await source.next_batch() for _ in range(number)]
    await source.aclose()
    return batches


def test_without_over_sampling_and_filter_batches_are_those_of_a_rollout_source():
    """The same prompts, seeds, tokens and credit; of requests that are groups already, too."""
    plain = RolloutBatchSource(
        engine=make_engine(),
        requests_fn=make_requests(batch_size=2, group_size=4),
        credit_assigner=EpisodicReturn(),
        concurrency=3,
    )

    async def plain_batches():
        return [content(await plain.next_batch()) for _ in range(3)]

    wanted = play_jumping(plain_batches())
    for requests in (make_requests(batch_size=3), make_requests(batch_size=3, group_size=4)):
        rolling = play_jumping(take(make_source(requests=requests), 3))
        assert [content(batch) for batch in rolling] == wanted


def test_rejected_groups_are_replaced_by_the_next_prompts():
    order = make_requests(batch_size=20)()
    source = make_source(group_filter=DIFFERENT, order="submission")
    batches = play_jumping(take(source, 4))
    for batch in batches:
        rewards = [item.meta["total_reward"] for item in batch.items]
        assert all(len(set(rewards[first : first + 4])) == 2 for first in range(0, len(rewards), 4))
    trained = [prompt for batch in batches for prompt in prompts_of(batch)]
    begun = [request.meta["prompt"] for request in order][: source.counts.admitted]
    assert trained == [prompt for prompt in begun if prompt in trained]
    assert source.counts.rejected == sum(batch.meta["groups/rejected"] for batch in batches) == len(begun) - len(trained) > 0


def test_groups_leave_in_the_order_of_arrival_and_not_too_late():
    source = make_source(over_sampling_factor=2.0, max_lag=2)
    batches = play_jumping(take(source, 6))
    assert [len(batch.items) for batch in batches] == [8] * 6
    assert max(batch.meta["groups/lag_max"] for batch in batches) <= 2
    assert max(batch.meta["groups/lag_mean"] for batch in batches) > 0
    assert source.overlaps
    assert source.max_lag == 2
    assert source.counts.rejected == source.counts.lost == 0


def test_the_limit_of_episodes_holds_over_all_groups():
    client = SeededClient()
    source = make_source(make_engine(client), over_sampling_factor=3.0, concurrency=5)
    play_jumping(take(source, 3))
    assert client.most_running == 5


def test_a_group_that_fails_is_lost_counted_and_replaced(caplog):
    class Broken(Parity):
        broken = frozenset(range(0, 20, 3))

    source = make_source(make_engine(env=Broken), groups_per_batch=4)
    batches = play_jumping(take(source, 3))
    assert [len(batch.items) for batch in batches] == [16] * 3
    lost = sum(batch.meta["groups/lost"] for batch in batches)
    assert source.counts.lost == lost == sum(batch.meta["num_dropped_groups"] for batch in batches) > 0
    assert "the game is broken" in caplog.text


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_wrong_number_of_rewards_ends_the_run_at_once_and_loses_no_group(factor):
    class Miscounting(RewardFunctions):
        async def score(self, rollouts):
            for rollout in rollouts:
                rollout.meta["request_meta"]["row"] = {"prompt": "parity?"}
            return await super().score(rollouts)

    source = make_source(make_engine(scorer=Miscounting(lambda completions: [1.0])), over_sampling_factor=factor)
    with pytest.raises(WrongLength, match="returned 1 rewards for 4 completions"):
        play_jumping(take(source, 1))
    assert source.counts.lost == source.counts.retried == 0


@pytest.mark.parametrize("killed_after", [0, 1, 2, 3])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_run_that_is_killed_trains_what_one_that_is_not_does(killed_after, factor):
    settings = {"over_sampling_factor": factor, "order": "submission", "group_filter": DIFFERENT}
    wanted = [content(batch) for batch in play_jumping(take(make_source(**settings), 4))]

    async def killed():
        source = make_source(**settings)
        batches = [await source.next_batch() for _ in range(killed_after)]
        awaited = asyncio.create_task(source.next_batch())
        while not source.counts.arrived and not awaited.done():
            await asyncio.sleep(0.01)
        assert not awaited.done()  # one group of the batch is played, the other is not
        state = json.dumps(source.state_dict())
        awaited.cancel()
        await asyncio.wait([awaited])
        await source.aclose()
        return batches, state

    batches, state = play_jumping(killed())
    resumed = make_source(**settings)
    resumed.load_state_dict(json.loads(state))
    batches += play_jumping(take(resumed, 4 - killed_after))
    assert [content(batch) for batch in batches] == wanted


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_closing_a_source_ends_the_batch_that_a_task_awaits(factor):
    async def scenario():
        source = make_source(over_sampling_factor=factor)
        waiting = asyncio.create_task(source.next_batch())
        await asyncio.sleep(0.1)
        await source.aclose()
        with pytest.raises(RolloutAborted):
            await waiting
        assert len(asyncio.all_tasks()) == 1
        size = len((await source.next_batch()).items)
        await source.aclose()
        return size

    assert play_jumping(scenario()) == 8


def saved_state():
    async def scenario():
        source = make_source(over_sampling_factor=2.0, group_filter=DIFFERENT)
        for _ in range(2):
            await source.next_batch()
        await asyncio.sleep(0.5)
        state = json.loads(json.dumps(source.state_dict()))
        await source.aclose()
        return state

    return play_jumping(scenario())


SAVED = saved_state()


@given(st.integers(0, 2**32), st.integers(1, 3))
def test_a_random_edit_of_a_state_is_read_as_it_is_or_refused_and_changes_nothing(seed, number):
    """Members are compressed; what is read of them is tested where entries are."""
    edited, rng = SAVED, Random(seed)
    for _ in range(number):
        edited = edit(edited, rng, keep=("members", "num_samples", "rng_seed"))
    source = make_source(over_sampling_factor=2.0)
    before = source.state_dict()
    try:
        source.load_state_dict(edited)
    except ConfigError:
        assert source.state_dict() == before
    else:
        found = json.loads(json.dumps(source.state_dict()))
        starts = found["requests"].pop("starts")  # those that are needed
        assert all(start in edited["requests"]["starts"] for start in starts)
        assert found == {**edited, "requests": {key: edited["requests"][key] for key in ("next", "requests")}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": None}, r"engine \(None\) .*number of episodes"),
        ({"engine": {"episodes": "9"}}, r"engine.episodes \('9'\) must be a whole number"),
        ({"requests": []}, "must have next, requests, starts"),
        ({"requests": {**SAVED["requests"], "next": 3, "starts": []}}, "which requests had position 2"),
        ({"requests": {**SAVED["requests"], "requests": {}}}, r"position .*requests \(None\) .*whole number"),
        ({"note": 1}, "keys engine, note, pool, requests"),
    ],
)
def test_a_damaged_state_is_named_and_changes_nothing(change, message):
    source = make_source(over_sampling_factor=2.0)
    before = source.state_dict()
    with pytest.raises(ConfigError, match=message):
        source.load_state_dict({**SAVED, **change})
    assert source.state_dict() == before
    pool = json.loads(json.dumps(SAVED["pool"]))
    pool["groups"][0]["members"] = {"0": "no group"}
    with pytest.raises(ConfigError, match=r"member 0 of group \d+ .*read"):
        source.load_state_dict({**SAVED, "pool": pool})
    assert source.state_dict() == before


def test_a_server_that_is_away_loses_no_group():
    class Away(SeededClient):
        async def complete(self, request):
            if asyncio.get_running_loop().time() < 9:
                raise ConnectionError("refused")
            return await super().complete(request)

    source = make_source(make_engine(Away()), over_sampling_factor=2.0, order="submission")
    wanted = [content(batch) for batch in play_jumping(take(make_source(over_sampling_factor=2.0, order="submission"), 2))]
    batches = play_jumping(take(source, 2))
    assert [content(batch) for batch in batches] == wanted
    assert source.counts.lost == 0
    assert [batch.meta["num_dropped_groups"] for batch in batches] == [0, 0]


def test_a_source_that_is_never_saved_forgets_the_batches_of_requests_that_it_is_through_with():
    asked = []
    inner = make_requests(batch_size=1)

    class Requests:
        def __call__(self):
            return inner()

        def state_dict(self):
            state = State(inner.state_dict())
            asked.append(weakref.ref(state))
            return state

        def __deepcopy__(self, memo):
            return self

        def load_state_dict(self, state):
            inner.load_state_dict(state)

    class State(dict):
        def __deepcopy__(self, memo):
            return self

    async def scenario():
        source = make_source(requests=Requests(), over_sampling_factor=2.0)
        for _ in range(30):
            await source.next_batch()
            assert sum(state() is not None for state in asked) <= 2 * 4 + 2
        resumed = make_source(requests=make_requests(batch_size=1), over_sampling_factor=2.0)
        state = json.loads(json.dumps(source.state_dict()))
        await source.aclose()
        resumed.load_state_dict(state)
        size = len((await resumed.next_batch()).items)
        await resumed.aclose()
        return size

    assert play_jumping(scenario()) == 8
    assert len(asked) > 60


def test_an_error_says_which_filter_rejected_which_rewards():
    def unreachable(rollouts):
        return False

    source = make_source(group_filter=unreachable, patience=2)
    with pytest.raises(RolloutError, match=r"rejected \d groups.*x unreachable .*rewards .*of 1"):
        play_jumping(source.next_batch())


def test_requests_that_end_give_a_short_batch_and_then_an_end():
    class Three:
        def take(self):
            if self.position == 3:
                raise RequestsExhausted("three prompts")
            self.position += 1
            return self.position - 1, self.at(self.position - 1)

        def at(self, position):
            return RolloutRequest(
                EnvSpec("parity", {"sample": position}), ProtocolSpec("p"), inference=FOR_RL, meta={"prompt": position}
            )

        position = 0

    async def scenario():
        source = make_source(requests=Three())
        sizes = [len((await source.next_batch()).items) for _ in range(2)]
        with pytest.raises(RequestsExhausted):
            await source.next_batch()
        return sizes

    assert play_jumping(scenario()) == [8, 4]


def test_rollouts_are_reported_before_credit():
    seen = []
    source = make_source(on_rollouts=lambda number, rollouts: seen.append((number, len(rollouts))))
    play_jumping(take(source, 2))
    assert seen == [(0, 8), (1, 8)]


def test_mistakes_are_errors_with_a_remedy():
    async def coroutine():
        return []

    with pytest.raises(ConfigTypeError, match="must be a plain function"):
        play_jumping(make_source(requests=coroutine).next_batch())
    with pytest.raises(ConfigError, match=r"2 members, .*group_size is 4"):
        play_jumping(make_source(requests=make_requests(group_size=2)).next_batch())
    request = RolloutRequest(EnvSpec("parity", {"sample": 1}), ProtocolSpec("p"), num_episodes=4)
    with pytest.raises(ConfigError, match="num_episodes=4; set group_size"):
        play_jumping(make_source(requests=lambda: [request]).next_batch())
    with pytest.raises(ConfigError, match="without over-sampling and group filter"):
        make_source().load_state_dict({"batches": 3})
    with pytest.raises(ConfigError, match="set max_lag=1"):
        make_source(over_sampling_factor=1.5, max_lag=0)
    with pytest.raises(ConfigError, match=r"concurrency \(0\)"):
        make_source(concurrency=0)


def test_requests_without_a_state_cannot_be_resumed_in_the_middle():
    request = RolloutRequest(EnvSpec("parity", {"sample": 1}), ProtocolSpec("p"), inference=FOR_RL, meta={"prompt": 1})

    async def scenario():
        source = make_source(requests=lambda: [request], over_sampling_factor=2.0)
        await source.next_batch()
        state = source.state_dict()
        await source.aclose()
        return state

    state = play_jumping(scenario())
    with pytest.raises(ConfigError, match="requests has no state_dict"):
        make_source(requests=lambda: [request], over_sampling_factor=2.0).load_state_dict(state)
