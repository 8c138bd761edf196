"""The manager of rollouts: whole groups, exact batches, aborts and states, and every mistake of the
functions passed in named with the remedy. Times are those of a virtual clock."""

import asyncio
import functools
import json
import threading
from random import Random

import pytest
from hypothesis import given, strategies as st
from jumping_loop import play_jumping
from state_edits import edit

from ludic.errors import ConfigError, ConfigTypeError, DataError, RequestsExhausted, RolloutAborted, RolloutError
from ludic.rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, SampleStatus, filters
from ludic.rollouts.training.rollout_gen import generate_rollout_batch
from ludic.training.rollouts.member_calls import seed_of_member


def answer(prompt, seed, **changes):
    """What a model that heeds its seed would say."""
    fields = {"response": f"{prompt}:{seed}", "tokens": [1, seed % 1000], "loss_mask": [0, 1], "rollout_log_probs": [0, -0.5]}
    return Sample(prompt, **{**fields, "reward": float(seed % 2), **changes})


async def generate(prompts, seeds):
    """Takes a time that follows from the seed, up to ten seconds."""
    await asyncio.sleep(Random(seeds[0]).random() ** 3 * 10)
    return [answer(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]


def make_manager(prompts=8, config=None, **changes):
    settings = {"batch_size": 3, "n_samples_per_prompt": 2, "generate_fn": generate, **changes}
    return AsyncRolloutManager(DataBuffer([f"p{i}" for i in range(prompts)], seed=1), config or RolloutConfig(**settings))


async def take_batches(manager, number):
    async with manager:
        return [await manager.generate_batch() for _ in range(number)]


@pytest.mark.parametrize("group_calls", [False, True])
@pytest.mark.parametrize("order", ["arrival", "submission"])
def test_groups_are_whole_and_batches_exact(order, group_calls):
    manager = make_manager(over_sampling_factor=1.5, order=order, group_calls=group_calls)
    batches = play_jumping(take_batches(manager, 6))
    samples = [sample for batch in batches for sample in batch.samples]
    assert [len(batch.tokens) for batch in batches] == [6] * 6
    for first, second in zip(samples[::2], samples[1::2], strict=True):
        assert first.group_index == second.group_index
        assert (first.index, second.index) == (2 * first.group_index, 2 * first.group_index + 1)
        assert first.prompt == second.prompt == manager.data_buffer.at(first.group_index)
        assert first.response == f"{first.prompt}:{seed_of_member(0, first.group_index, 0)}"
        assert second.response == f"{second.prompt}:{seed_of_member(0, second.group_index, 1)}"
        assert first.status is SampleStatus.COMPLETED
    groups = [sample.group_index for sample in samples[::2]]
    assert len(set(groups)) == 18
    assert (
        groups == list(range(18)) if order == "submission" else all(0 <= lag <= 1 for b in batches for lag in b.metadata["lags"])
    )
    assert (batches[2].metadata["step_id"], batches[2].metadata["batch_size"], manager.step_count) == (2, 6, 6)


def test_over_sampling_does_not_wait_for_the_slowest():
    async def seconds(factor):
        await take_batches(make_manager(batch_size=8, over_sampling_factor=factor), 10)
        return asyncio.get_running_loop().time()

    assert play_jumping(seconds(1.5)) < 0.8 * play_jumping(seconds(1.0))


def test_refused_groups_are_replaced_after_their_rewards():
    judged = []

    async def judge(sample):
        await asyncio.sleep(1)
        judged.append(sample.index)
        return 1.0 if "3" in sample.prompt or "5" in sample.prompt else 0.0

    manager = make_manager(batch_size=2, reward_fn=judge, filter_fn=filters.check_min_reward)
    [first, second] = play_jumping(take_batches(manager, 2))
    assert first.metadata["prompts"] == ["p3", "p3", "p5", "p5"]
    assert first.metadata["rejected"] == 4
    assert second.rewards == [1.0] * 4
    assert len(judged) == len(set(judged))


def test_a_filter_that_refuses_everything_says_which_rewards_it_saw():
    manager = make_manager(reward_fn=lambda sample: 0.5, filter_fn=filters.check_reward_nonzero_std, patience=2)
    with pytest.raises(RolloutError, match=r"7 x check_reward_nonzero_std, rewards 0.5, 0.5"):
        play_jumping(take_batches(manager, 1))


def test_the_reward_function_of_the_call_comes_before_that_of_the_configuration():
    async def run():
        manager = make_manager(reward_fn=lambda sample: 1.0)
        return (await manager.generate_batch(lambda sample: 2.0)).rewards, (await manager.generate_batch()).rewards

    assert play_jumping(run()) == ([2.0] * 6, [1.0] * 6)


def test_samples_say_which_weights_sampled_them():
    versions = []

    async def generate_with_version(prompts, seeds, weight_version):
        versions.append(weight_version)
        return await generate(prompts, seeds)

    async def run():
        manager = make_manager(generate_fn=generate_with_version, over_sampling_factor=2.0)
        async with manager:
            first = await manager.generate_batch()
            manager.weights_changed(7)
            return first, await manager.generate_batch()

    first, second = play_jumping(run())
    assert first.metadata["sample_weight_version"] == [0] * 6
    begun, ended = second.metadata["sample_weight_version"], second.metadata["sample_weight_version_end"]
    assert set(begun) <= {0, 7}
    assert 7 in ended
    assert all(start <= end for start, end in zip(begun, ended, strict=True))
    assert set(versions) == {0, 7}


def test_metadata_that_samples_share_with_their_rows_is_not_written_into():
    """Each row passes its own facts on to all its samples, in every epoch."""

    async def generate_with_facts(prompts):
        return [Sample(row["question"], tokens=[1], loss_mask=[1], metadata=row["facts"]) for row in prompts]

    def make():
        rows = [{"question": f"q{n}", "facts": {"level": n}} for n in range(2)]
        return AsyncRolloutManager(DataBuffer(rows), RolloutConfig(2, 2, generate_fn=generate_with_facts))

    async def run(manager):
        batches = []
        for version in range(3):
            manager.weights_changed(version)
            batches.append(await manager.generate_batch())
        return batches

    manager = make()
    for version, batch in enumerate(play_jumping(run(manager))):
        assert batch.metadata["sample_weight_version"] == [version] * 4
        assert batch.metadata["sample_weight_version_end"] == [version] * 4
        assert sorted(batch.metadata["sample_level"]) == [0, 0, 1, 1]
    assert [row["facts"] for row in manager.data_buffer.prompts] == [{"level": 0}, {"level": 1}]
    make().load_state_dict(json.loads(json.dumps(manager.state_dict())))  # the data are what they were


def test_a_failed_call_is_repeated_with_its_seed_and_its_siblings_stay():
    calls = []

    async def generate_or_fail(prompts, seeds):
        calls.append(seeds[0])
        if calls.count(seeds[0]) == 1 and seeds[0] % 3 == 0:
            raise ConnectionError("no answer")
        return [answer(prompts[0], seeds[0])]

    manager = make_manager(generate_fn=generate_or_fail)
    [batch] = play_jumping(take_batches(manager, 1))
    assert [sample.index for sample in batch.samples] == list(range(6))
    first_calls = {seed_of_member(0, group, member) for group in range(3) for member in range(2)}
    failed = sum(seed % 3 == 0 for seed in first_calls)
    assert batch.metadata["retried"] == failed > 0
    assert sum(calls.count(seed) for seed in first_calls) == 6 + failed


def test_a_reward_that_fails_is_computed_again_without_sampling_anew():
    sampled, judged = [], []

    async def generate_once(prompts, seeds):
        sampled.append(seeds[0])
        return [answer(prompts[0], seeds[0])]

    async def judge(sample):
        judged.append(sample.index)
        if judged.count(sample.index) == 1:
            raise TimeoutError("the judge is slow")
        return float("nan") if judged.count(sample.index) == 2 else 1.0

    manager = make_manager(generate_fn=generate_once, reward_fn=judge, max_retries=2)
    batch = play_jumping(manager.generate_batch())
    assert batch.rewards == [1.0] * 6
    assert sorted(judged) == sorted(list(range(6)) * 3)
    assert len(sampled) == len(set(sampled)) == 6


def test_a_reward_that_is_never_finite_is_an_error_and_not_a_zero():
    manager = make_manager(reward_fn=lambda sample: float("nan"), max_retries=0)
    with pytest.raises(RolloutError, match=r"6 groups .*lost.*reward nan; .*finite"):
        play_jumping(manager.generate_batch())
    assert manager.counts.lost == 6


class Interruptible:
    """A model that says one token a second, six in all, and goes on with what it is given."""

    def __init__(self):
        self.partials = []

    async def __call__(self, prompts, seeds, partial):
        self.partials.append(partial)
        sample = partial or Sample(prompts[0])
        if partial and self.partials.count(None) == len(self.partials) - 1:
            partial.tokens.append(-1)  # half of a token, which the next call does not get
            raise ConnectionError("no answer")
        try:
            while len(sample.tokens) < 6:
                await asyncio.sleep(1)
                sample.tokens.append(len(sample.tokens))
                sample.loss_mask.append(1)
        except asyncio.CancelledError:
            sample.status = SampleStatus.ABORTED
        return [sample]


def test_an_aborted_call_goes_on_where_it_was():
    async def run():
        model = Interruptible()
        manager = make_manager(generate_fn=model, n_samples_per_prompt=1)
        loop = asyncio.get_running_loop()
        loop.call_later(2.5, manager.request_abort)
        with pytest.raises(RolloutAborted):
            await manager.generate_batch()
        state = json.loads(json.dumps(manager.state_dict()))
        restarted = make_manager(generate_fn=model, n_samples_per_prompt=1)
        restarted.load_state_dict(state)
        restarted.weights_changed(3)
        batch = await restarted.generate_batch()
        return model.partials, batch, loop.time()

    partials, batch, seconds = play_jumping(run())
    assert partials[:3] == [None] * 3
    assert [partial.tokens[2] for partial in partials[3:]] == [-1, 2, 2, 2]  # two by then; the same objects end with six
    assert seconds == 2.5 + 4
    assert batch.tokens == [[0, 1, 2, 3, 4, 5]] * 3
    assert batch.metadata["sample_weight_version"] == [0] * 3
    assert batch.metadata["sample_weight_version_end"] == [3] * 3


def test_without_partial_an_aborted_sample_is_sampled_anew():
    calls = []

    async def generate_or_abort(prompts, seeds):
        calls.append(seeds[0])
        status = SampleStatus.ABORTED if calls.count(seeds[0]) == 1 else SampleStatus.COMPLETED
        return [answer(prompts[0], seeds[0], status=status)]

    manager = make_manager(generate_fn=generate_or_abort)
    batch = play_jumping(manager.generate_batch())
    assert {sample.status for sample in batch.samples} == {SampleStatus.COMPLETED}
    assert len(calls) == 12


def test_abort_ends_a_thousand_calls_and_whole_samples_stay():
    async def run():
        calls = []

        async def generate_slowly(prompts, seeds):
            calls.append(seeds[0])
            await asyncio.sleep(1 if seeds[0] % 2 else 1000)
            return [answer(prompts[0], seeds[0])]

        manager = make_manager(batch_size=100, n_samples_per_prompt=10, generate_fn=generate_slowly)
        loop = asyncio.get_running_loop()
        async with manager:
            loop.call_later(2, manager.request_abort)
            with pytest.raises(RolloutAborted, match="resume"):
                await manager.generate_batch()
            assert loop.time() == 2
            assert len(asyncio.all_tasks()) == 1
            assert len(calls) == 1000
            with pytest.raises(RolloutAborted):
                await manager.generate_batch()
            manager.resume()
            batch = await manager.generate_batch()
        assert [sample.index for sample in batch.samples] == list(range(1000))
        again = len(calls) - 1000
        assert again == len([seed for seed in calls[:1000] if seed % 2 == 0])
        assert len(asyncio.all_tasks()) == 1

    play_jumping(run())


def test_a_plain_function_runs_in_a_thread_that_an_abort_lets_go():
    async def run():
        started, go_on, threads = threading.Semaphore(0), threading.Event(), []

        def generate_blocking(prompts):
            threads.append(threading.current_thread())
            started.release()
            go_on.wait(60)
            return [Sample(prompt, tokens=[1], loss_mask=[1]) for prompt in prompts]

        manager = make_manager(generate_fn=generate_blocking)
        batch = asyncio.create_task(manager.generate_batch())
        await asyncio.to_thread(lambda: [started.acquire(timeout=60) for _ in range(6)])
        manager.request_abort()
        with pytest.raises(RolloutAborted):
            await batch
        assert [thread.daemon for thread in threads] == [True] * 6
        go_on.set()
        manager.resume()
        assert len((await manager.generate_batch()).samples) == 6
        for thread in threads:
            await asyncio.to_thread(thread.join, 60)

    asyncio.run(run())


def test_no_thread_samples_between_batches_and_its_member_is_not_sampled_again():
    """The first prompt is a batch while the second still samples; it ends soon after, and with it
    the wait."""
    blocked, called, ended = threading.Event(), [], []

    def generate_in_thread(prompts):
        called.append(prompts[0])
        if prompts[0] == "p1":
            blocked.wait(60)
        ended.append(prompts[0])
        return [Sample(prompts[0], tokens=[1], loss_mask=[1])]

    async def judge(sample):
        if sample.prompt == "p0":
            turn(asyncio.get_running_loop(), 200)
        return 1.0

    def turn(loop, left):
        """Let the second prompt end after turns of the loop in which the batch could leave."""
        return loop.call_soon(turn, loop, left - 1) if left else blocked.set()

    async def run():
        manager = make_manager(
            batch_size=1,
            n_samples_per_prompt=1,
            over_sampling_factor=2.0,
            generate_fn=generate_in_thread,
            reward_fn=judge,
            generate_while_training=False,
        )
        async with manager:
            first = await manager.generate_batch()
            assert sorted(ended) == sorted(called) == ["p0", "p1"]
            assert manager.counts.arrived == 1
            second = await manager.generate_batch()
            assert sorted(ended) == sorted(called)
        assert (first.metadata["prompts"], second.metadata["prompts"]) == (["p0"], ["p1"])
        assert called.count("p1") == 1

    asyncio.run(run())


def test_outside_of_async_with_nothing_runs_between_batches():
    async def run():
        manager = make_manager(over_sampling_factor=2.0)
        await manager.generate_batch()
        assert len(asyncio.all_tasks()) == 1
        async with make_manager(over_sampling_factor=2.0, generate_while_training=False) as standing:
            await standing.generate_batch()
            assert len(asyncio.all_tasks()) == 1
        async with make_manager(over_sampling_factor=2.0) as going:
            await going.generate_batch()
            assert len(asyncio.all_tasks()) > 1
        assert len(asyncio.all_tasks()) == 1

    play_jumping(run())


@pytest.mark.parametrize("group_calls", [False, True])
@pytest.mark.parametrize("order", ["arrival", "submission"])
def test_a_run_killed_at_any_moment_loses_and_doubles_nothing(order, group_calls):
    """In the order of submission, the killed run is the run, sample for sample."""

    def make():
        return make_manager(
            order=order,
            group_calls=group_calls,
            over_sampling_factor=1.0 if order == "submission" else 1.5,
            reward_fn=lambda sample: float(sample.tokens[1] % 2),
            filter_fn=filters.check_reward_nonzero_std,
        )

    async def run(kills):
        manager, batches = make(), []
        state, deaths = json.dumps(manager.state_dict()), 0
        while len(batches) < 6:
            task = asyncio.create_task(manager.generate_batch())
            await asyncio.wait([task], timeout=kills.random() * 12 if kills and deaths < 8 else None)
            if task.done():
                batches.append(task.result())
                state = json.dumps(manager.state_dict())
                continue
            saved = json.dumps(manager.state_dict()) if kills.random() < 0.7 else state
            task.cancel()
            await asyncio.wait([task])
            manager, deaths = make(), deaths + 1
            manager.load_state_dict(json.loads(saved))
        return batches, manager.counts, deaths

    whole, _, _ = play_jumping(run(None))
    for seed in range(4):
        batches, counts, deaths = play_jumping(run(Random(seed)))
        groups = [sample.group_index for batch in batches for sample in batch.samples]
        assert deaths
        assert all(groups.count(group) == 2 for group in groups)
        assert counts.given + counts.rejected + counts.lost + counts.kept == counts.admitted
        assert counts.given == 18
        if order == "submission":
            assert [batch.samples for batch in batches] == [batch.samples for batch in whole]


def test_a_state_has_whole_samples_and_the_ledger():
    async def run():
        manager = make_manager(over_sampling_factor=2.0)
        async with manager:
            await manager.generate_batch()
            await asyncio.sleep(5)
            manager.weights_changed(4)
            return manager, json.loads(json.dumps(manager.state_dict()))

    manager, state = play_jumping(run())
    assert set(state) == {"buffer_state", "step_count", "partial_samples", "ledger", "weight_version"}
    assert (state["step_count"], state["weight_version"]) == (1, 4)
    assert len(manager.partial_samples) == len(state["partial_samples"]) == 2 * manager.counts.arrived > 0
    restarted = make_manager(over_sampling_factor=2.0)
    restarted.load_state_dict(state)
    assert restarted.state_dict() == manager.state_dict()


@pytest.mark.parametrize("strange", [{1, 2}, threading.Lock(), {(1, 2): 3}, b"bytes"])
def test_a_sample_that_json_has_no_form_for_is_sampled_again_by_a_resumed_run(strange, caplog):
    async def generate_strange(prompts, seeds, partial=None):
        status = SampleStatus.COMPLETED
        if seeds[0] == seed_of_member(0, 4, 0):
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                status = SampleStatus.ABORTED
        return [answer(prompts[0], seeds[0], metadata={"extra": strange}, status=status)]

    async def run():
        manager = make_manager(generate_fn=generate_strange, over_sampling_factor=2.0)
        async with manager:
            await manager.generate_batch()
            await asyncio.sleep(1)
            assert (manager.counts.arrived, manager.counts.owed) == (2, 1)
        state = json.loads(json.dumps(manager.state_dict()))
        restarted = make_manager(over_sampling_factor=2.0)
        restarted.load_state_dict(state)
        assert (restarted.counts.arrived, restarted.counts.owed) == (0, 3)
        return await restarted.generate_batch()

    assert len(play_jumping(run()).samples) == 6
    assert "must be JSON values" in caplog.text


def test_a_token_of_a_state_takes_at_most_thirteen_bytes():
    n = 2000

    async def generate_long(prompts, seeds):
        if seeds[0] == seed_of_member(0, 5, 1):
            await asyncio.sleep(100)
        return [Sample(prompts[0], "", [150_000] * n, [1] * n, rollout_log_probs=[-0.123456789] * n)]

    async def run():
        manager = make_manager(generate_fn=generate_long, over_sampling_factor=2.0)
        async with manager:
            await manager.generate_batch()
            await asyncio.sleep(1)
            return manager.counts, len(json.dumps(manager.state_dict()))

    counts, size = play_jumping(run())
    assert counts.arrived == 2
    assert size <= 13 * n * (2 * counts.arrived + 1)


def test_a_state_without_a_ledger_keeps_complete_groups(caplog):
    old = [Sample(f"old{i}", tokens=[i], loss_mask=[1], group_index=i // 2) for i in range(5)]
    state = {
        "buffer_state": {"epoch_id": 0, "sample_offset": 4, "seed": 1},
        "step_count": 2,
        "partial_samples": [sample.to_dict() for sample in old],
    }
    manager = make_manager()
    manager.load_state_dict(state)
    batch = play_jumping(manager.generate_batch())
    assert batch.metadata["prompts"] == ["old0", "old1", "old2", "old3", "p4", "p4"]
    assert batch.metadata["step_id"] == 2
    assert "1 of 5 partial samples are dropped" in caplog.text
    singles = AsyncRolloutManager(DataBuffer(["p"]), RolloutConfig(2, generate_fn=generate), partial_samples=old[:1])
    assert play_jumping(singles.generate_batch()).metadata["prompts"] == ["old0", "p"]


class OwnBuffer:
    """A user's buffer, without positions."""

    def __init__(self):
        self.given = 0

    def get_prompts(self, n):
        self.given += n
        return [f"q{self.given - 1}"]

    def save_state(self):
        return {"given": self.given}

    def load_state(self, state):
        self.given = state["given"]


def test_prompts_of_a_buffer_without_positions_are_in_the_state():
    async def run():
        config = RolloutConfig(3, generate_fn=generate)
        manager = AsyncRolloutManager(OwnBuffer(), config)
        asyncio.get_running_loop().call_later(0.1, manager.request_abort)
        with pytest.raises(RolloutAborted):
            await manager.generate_batch()
        restarted = AsyncRolloutManager(OwnBuffer(), config)
        restarted.load_state_dict(json.loads(json.dumps(manager.state_dict())))
        return await restarted.generate_batch()

    assert play_jumping(run()).metadata["prompts"] == ["q0", "q1", "q2"]


def test_a_state_that_does_not_fit_changes_nothing():
    async def run():
        manager = make_manager(over_sampling_factor=2.0)
        async with manager:
            await manager.generate_batch()
            await asyncio.sleep(5)
            with pytest.raises(ConfigError, match="playing groups"):
                manager.load_state_dict(manager.state_dict())
            return manager.state_dict()

    state = play_jumping(run())
    others = [
        (make_manager(prompts=9), "num_prompts=8"),
        (make_manager(n_samples_per_prompt=3), "n_samples_per_prompt"),
        (make_manager(group_calls=True), "members"),
    ]
    for manager, reason in others:
        before = manager.state_dict()
        with pytest.raises(ConfigError, match=reason):
            manager.load_state_dict(state)
        assert manager.state_dict() == before
    with pytest.raises(ConfigError, match="no buffer_state"):
        make_manager().load_state_dict({"step_count": 0, "partial_samples": []})


def saved_state(group_calls):
    """A state with complete groups, whole members of others, and an interrupted one."""

    async def generate_or_stop(prompts, seeds, partial=None):
        try:
            return await generate(prompts, seeds)
        except asyncio.CancelledError:
            return [answer(prompt, seed, status=SampleStatus.ABORTED) for prompt, seed in zip(prompts, seeds, strict=True)]

    async def run():
        manager = make_manager(generate_fn=generate_or_stop, over_sampling_factor=2.0, group_calls=group_calls)
        async with manager:
            await manager.generate_batch()
            await asyncio.sleep(0.5)
            manager.weights_changed(4)
        return json.loads(json.dumps(manager.state_dict()))

    return play_jumping(run())


SAVED = {group_calls: saved_state(group_calls) for group_calls in (False, True)}


@given(st.booleans(), st.integers(0, 2**32), st.integers(1, 3))
def test_a_random_edit_of_a_state_is_read_as_it_is_or_refused_and_changes_nothing(group_calls, seed, number):
    edited, rng = SAVED[group_calls], Random(seed)
    for _ in range(number):
        edited = edit(edited, rng, keep=("prompt", "metadata", "rollout_log_probs", "loss_mask", "tokens"))
    manager = make_manager(over_sampling_factor=2.0, group_calls=group_calls)
    before = manager.state_dict()
    try:
        manager.load_state_dict(edited)
    except ConfigError:
        assert manager.state_dict() == before
    else:
        found = manager.state_dict()
        assert without_optional(found, edited) == without_optional(edited, edited)


def without_optional(state, wanted):
    """The state without what may be left out of it, and is in the state of a manager: the buffer's
    facts, which are checked where they are there, and the version."""
    buffer = {key: value for key, value in state["buffer_state"].items() if key in wanted["buffer_state"] and key in BUFFER_KEYS}
    version = state.get("weight_version", 0) if "weight_version" in wanted else 0
    known = {key: state[key] for key in ("step_count", "partial_samples")}
    return {**known, "ledger": state["ledger"] if "ledger" in wanted else None, "buffer_state": buffer, "weight_version": version}


BUFFER_KEYS = ("epoch_id", "sample_offset", "seed", "num_prompts", "digest")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partial_samples": {}}, "partial_samples must be a list"),
        ({"ledger": {}}, "arrivals and groups .*must be lists"),
        ({"step_count": 7}, "step_count is 7, .*batch 1"),
        ({"weight_version": "new"}, r"weight_version \('new'\) must be a whole number"),
        ({"buffer_state": {"epoch_id": "0", "sample_offset": 0}}, r"epoch_id of the state \('0'\) must be a whole number"),
        ({"buffer_state": None}, "DataBuffer cannot load buffer_state"),
    ],
)
def test_a_damaged_state_is_named_and_changes_nothing(change, message):
    manager = make_manager(over_sampling_factor=2.0)
    before = manager.state_dict()
    with pytest.raises(ConfigError, match=message):
        manager.load_state_dict({**SAVED[False], **change})
    assert manager.state_dict() == before


@pytest.mark.parametrize(
    "prompt", [{"question": object()}, {1: "a"}, {"rows": [{None: 1}]}, {1: "a", "1": "b"}, [(1, {True: 2})]]
)
def test_a_prompt_without_a_form_in_json_needs_a_buffer_with_positions(prompt):
    class Strange(OwnBuffer):
        def get_prompts(self, n):
            return [prompt]

    async def run():
        manager = AsyncRolloutManager(Strange(), RolloutConfig(1, generate_fn=generate, over_sampling_factor=2.0))
        await manager.generate_batch(lambda sample: 1.0)
        with pytest.raises(DataError, match=r"prompt of group \d .*JSON .*`position` and `at"):
            manager.state_dict()

    play_jumping(run())


def test_an_interrupted_call_that_goes_on_costs_no_attempt():
    """A server that ends each call after a token, without retries: 6 calls a sample, none lost."""

    async def generate_a_token(prompts, seeds, partial):
        sample = partial or Sample(prompts[0])
        sample.tokens.append(len(sample.tokens))
        sample.loss_mask.append(1)
        sample.status = SampleStatus.ABORTED if len(sample.tokens) < 6 else SampleStatus.COMPLETED
        return [sample]

    manager = make_manager(generate_fn=generate_a_token, max_retries=0)
    batch = play_jumping(manager.generate_batch())
    assert batch.tokens == [[0, 1, 2, 3, 4, 5]] * 6
    assert (batch.metadata["lost"], batch.metadata["retried"]) == (0, 0)


def test_the_last_prompts_are_a_short_batch():
    async def run():
        buffer = DataBuffer(list("abcd"), epochs=1)
        async with AsyncRolloutManager(buffer, RolloutConfig(3, generate_fn=generate)) as manager:
            sizes = [len((await manager.generate_batch()).samples) for _ in range(2)]
            with pytest.raises(RequestsExhausted):
                await manager.generate_batch()
            return sizes

    assert play_jumping(run()) == [3, 1]


def test_the_prompt_of_the_data_is_not_what_the_function_writes_into():
    async def converse(prompts):
        prompts[0].append({"role": "assistant", "content": "yo"})
        prompts[0][0]["content"] = "changed"
        return [Sample(prompts[0], tokens=[1], loss_mask=[1])]

    buffer = DataBuffer([[{"role": "user", "content": "hi"}]])
    play_jumping(AsyncRolloutManager(buffer, RolloutConfig(2, generate_fn=converse)).generate_batch())
    assert buffer.at(0) == [{"role": "user", "content": "hi"}]


def test_one_batch_takes_no_more_prompts_than_it_needs():
    buffer = DataBuffer([f"p{i}" for i in range(8)])
    config = RolloutConfig(2, over_sampling_factor=2.0, generate_fn=generate)
    batch = play_jumping(generate_rollout_batch(buffer, config, lambda sample: 3.0, seeds=[5]))
    assert batch.rewards == [3.0, 3.0]
    assert buffer.position == 2


async def one_sample(prompts):
    return [answer(prompt, 1) for prompt in prompts]


@pytest.mark.parametrize(
    ("settings", "error", "remedy"),
    [
        ({"generate_fn": lambda prompts: None}, DataError, "returned None; it must return a list"),
        ({"generate_fn": lambda prompts: "4"}, DataError, "returned a str"),
        ({"generate_fn": functools.partial(generate, [], [1])}, ConfigTypeError, "take a list of prompts"),
        ({"generate_fn": lambda prompts: [Sample("p")] * 2}, DataError, "returned 2 samples for 1 prompts"),
        ({"generate_fn": lambda prompts: [Sample("p", tokens=[1])]}, DataError, "1 tokens .*loss_mask of 0"),
        ({"reward_fn": lambda sample: None}, ConfigError, "returned None; a reward function"),
        ({"filter_fn": one_sample}, ConfigTypeError, "a filter must be a plain function"),
    ],
)
def test_a_wrong_function_is_an_error_at_once(settings, error, remedy):
    calls = []

    async def run():
        manager = make_manager(**{"generate_fn": one_sample, **settings}, max_retries=1000)
        async with manager:
            for _ in range(2):
                with pytest.raises(error, match=remedy):
                    await manager.generate_batch()
                calls.append(manager.counts.lost)

    if isinstance(settings.get("generate_fn"), functools.partial):
        with pytest.raises(error, match=remedy):
            make_manager(**settings)
    else:
        asyncio.run(run())
        assert calls == [0, 0]


@pytest.mark.parametrize(
    ("make", "error", "remedy"),
    [
        (lambda: AsyncRolloutManager(["p"], RolloutConfig(1, generate_fn=generate)), ConfigTypeError, "use DataBuffer"),
        (
            lambda: AsyncRolloutManager(DataBuffer(["p"]), RolloutConfig(1, generate_fn=one_sample), rollout_kwargs={"top_k": 1}),
            ConfigTypeError,
            "one_sample.*got an unexpected keyword argument 'top_k'",
        ),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_the_remedy(make, error, remedy):
    with pytest.raises(error, match=remedy):
        make()


def test_what_runs_on_no_loop_of_asyncio_says_so():
    batch = make_manager().generate_batch()
    with pytest.raises(RolloutError, match="needs a running loop of asyncio"):
        batch.send(None)


def test_a_coroutine_in_the_place_of_a_reward_function_is_an_error():
    with pytest.raises(ConfigTypeError, match="pass it without calling it"):
        play_jumping(make_manager().generate_batch(one_sample([])))
