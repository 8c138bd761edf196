"""Batches generated on demand: what the source passes to the engine, and what a resumed run
plays."""

import pytest
from playing import FOR_RL, Counting, ScriptedClient, play, protocol, tiny_model

from ludic.errors import ConfigError, RolloutError
from ludic.training import (
    BatchSource,
    ConstantCredit,
    EnvSpec,
    EpisodicReturn,
    OfflineBatchSource,
    ProtocolSpec,
    RequestsExhausted,
    RolloutBatchSource,
    RolloutEngine,
    RolloutRequest,
    SAWBatch,
    SAWItem,
    Trainer,
    TrainerConfig,
    drop_truncated,
    make_dataset_sequence_requests_fn,
    make_grpo,
    make_reinforce,
    ranks,
)
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.overlapped import OverlappedSource
from ludic.training.batching.source import as_batch_source
from ludic.training.rollouts.log import append_rollouts
from ludic.training.rollouts.to_samples import sample_from_step
from ludic.types import Rollout, Step, TokenTrace


class Recording:
    """An engine that records its arguments."""

    def __init__(self):
        self.arguments = None

    async def generate_batch(self, **arguments):
        self.arguments = arguments


def test_every_setting_reaches_the_engine():
    engine, wanted, assigner = Recording(), [RolloutRequest(EnvSpec("e"), ProtocolSpec("p"))], ConstantCredit()
    settings = {"max_steps": 3, "timeout_s": 4.5, "concurrency": 6, "sample_filter": drop_truncated}
    play(RolloutBatchSource(engine=engine, request_fn=lambda: wanted, credit_assigner=assigner, **settings).next_batch())
    assert engine.arguments == {"requests": wanted, "credit_assigner": assigner, **settings}


def test_a_source_knows_whether_ranks_would_play_the_same_prompts(tmp_path):
    def source(**settings):
        return RolloutBatchSource(engine=Recording(), requests_fn=list, credit_assigner=ConstantCredit(), **settings)

    item = SAWItem([1, 2], [1, 1], [0, 1], 1.0)
    assert source().shards_across_ranks is False
    assert source(shards_across_ranks=True).shards_across_ranks is True
    assert [OverlappedSource(source(shards_across_ranks=each)).shards_across_ranks for each in (False, True)] == [False, True]
    assert ItemBatchSource([item], batch_size=1).shards_across_ranks is True
    append_rollouts(tmp_path / "r.jsonl", [Rollout(steps=[Step(0, "", "", None, 0.0, False, True, trace=TokenTrace([1], [2]))])])
    assert OfflineBatchSource(tmp_path / "r.jsonl", sample_from_step, ConstantCredit()).shards_across_ranks is True


def test_a_users_source_without_that_member_is_left_undecided():
    class Own:
        async def next_batch(self):
            return SAWBatch([])

    class Inherited(BatchSource):
        async def next_batch(self):
            return SAWBatch([])

    assert OverlappedSource(Own()).shards_across_ranks is None
    assert as_batch_source(Inherited()).shards_across_ranks is None


def test_several_ranks_refuse_a_source_that_would_play_the_same_prompts_on_each(monkeypatch):
    def trainer(**settings):
        source = RolloutBatchSource(engine=Recording(), requests_fn=list, credit_assigner=ConstantCredit(), **settings)
        return Trainer(model=tiny_model(), algo=make_reinforce(), batch_source=source, cfg=TrainerConfig(model_device="cpu"))

    trainer()
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks, "is_distributed", lambda: True)
    with pytest.raises(ConfigError, match=r"RolloutBatchSource\) .*2 ranks .*SharedBatches"):
        trainer()
    trainer(shards_across_ranks=True)


def test_an_explicit_credit_assigner_takes_precedence_over_the_algorithms():
    mine = EpisodicReturn()
    made = RolloutBatchSource(engine=Recording(), requests_fn=list, credit_assigner=mine, algorithm=make_grpo(group_size=2))
    assert made.credit_assigner is mine


def test_requests_may_come_from_a_coroutine_function():
    engine, wanted = Recording(), [RolloutRequest(EnvSpec("e"), ProtocolSpec("p"))]

    async def requests():
        return wanted

    play(RolloutBatchSource(engine=engine, requests_fn=requests, credit_assigner=ConstantCredit()).next_batch())
    assert engine.arguments["requests"] is wanted


def test_the_end_of_requests_reaches_the_caller():
    def none_left():
        raise RequestsExhausted("that was all")

    with pytest.raises(RequestsExhausted, match="that was all"):
        play(RolloutBatchSource(engine=Recording(), requests_fn=none_left, credit_assigner=ConstantCredit()).next_batch())


BROKEN: set[int] = set()


@pytest.fixture(autouse=True)
def _whole():
    BROKEN.clear()


def environment(sample):
    if sample in BROKEN:
        raise OSError(f"row {sample} is broken")
    return Counting()


def source():
    engine = RolloutEngine(
        env_registry={"e": environment}, protocol_registry={"p": lambda: protocol(ScriptedClient("a"))}, max_retries=0
    )
    requests = make_dataset_sequence_requests_fn(
        list(range(10)),
        batch_size=2,
        env_kind="e",
        protocol_kind="p",
        inference=FOR_RL,
        shuffle=True,
        rng_seed=3,
        request_meta_fn=lambda index, sample: {"row": index},
    )
    return RolloutBatchSource(engine=engine, requests_fn=requests, credit_assigner=ConstantCredit())


def rows(batch_source):
    batch = play(batch_source.next_batch())
    return [(item.meta["row"], item.meta["episode_idx"]) for item in batch.items]


def test_a_resumed_run_plays_what_the_uninterrupted_run_plays():
    whole = source()
    expected = [rows(whole) for _ in range(7)]  # into the second pass
    first = source()
    played = [rows(first) for _ in range(4)]
    second = source()
    second.load_state_dict(first.state_dict())
    assert played + [rows(second) for _ in range(3)] == expected


def test_a_resumed_run_plays_a_failed_batch_again():
    expected = [rows(whole) for whole in [source()] for _ in range(3)]
    first = source()
    rows(first)
    before = first.state_dict()
    BROKEN.update(row for row, _ in expected[1])
    with pytest.raises(RolloutError, match="is broken"):
        play(first.next_batch())
    assert first.state_dict() == before
    BROKEN.clear()
    second = source()
    second.load_state_dict(first.state_dict())
    assert [rows(second), rows(second)] == expected[1:]


def test_a_state_for_other_samples_or_another_order_is_refused():
    state = source().state_dict()
    for name in ("num_samples", "rng_seed"):
        with pytest.raises(ValueError, match=name):
            source().load_state_dict({**state, "requests": {**state["requests"], name: 99}})


def test_a_source_of_plain_functions_saves_only_the_engines_state():
    engine = RolloutEngine(env_registry={}, protocol_registry={})
    made = RolloutBatchSource(engine=engine, requests_fn=list, credit_assigner=ConstantCredit())
    assert made.state_dict() == {"engine": {"episodes": 0}}
    made.load_state_dict({"requests": {"position": 4}})
    made.load_state_dict({"engine": {"episodes": 5}})
    assert engine.state_dict() == {"episodes": 5}
