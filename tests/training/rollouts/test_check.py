"""One check of what samplers, queues and a user's source hand to training, where each comes in."""

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest
from memory_log import MemoryLog
from playing import FOR_RL, protocol
from training_samples import sorting_items, tiny_model

from ludic.columns import float_column, int_column
from ludic.envs import SingleAgentEnv
from ludic.errors import DataError, RolloutError
from ludic.training import (
    ActorTokenLogps,
    EnvSpec,
    EpisodicReturn,
    PipelineBatchSource,
    ProtocolSpec,
    RolloutBatchSource,
    RolloutEngine,
    RolloutRequest,
    SampleAttachments,
    SAWBatch,
    Trainer,
    TrainerConfig,
    make_grpo,
)
from ludic.training.batching.overlapped import OverlappedSource
from ludic.training.batching.sample_codec import decode_batch, encode_batch
from ludic.training.batching.shared_batches import SharedBatches
from ludic.training.queue.entries import SampleGroup, encode_samples
from ludic.training.rollouts.episodes import MAX_LATER_VERSIONS, SampleCheck
from ludic.types import ChatResponse, StepOutcome

VOCABULARY = tiny_model().get_input_embeddings().weight.shape[0]
FAULTS = {
    "id": ({"ids": VOCABULARY}, rf"token id {VOCABULARY}, .*vocabulary has {VOCABULARY}"),
    "logit": ({"logp": 5.0}, "log-probability 5; .*at most 0"),
    "version": ({"version": 2**62}, rf"policy_version {2**62}; .*0 to {MAX_LATER_VERSIONS}"),
    "negative version": ({"version": -(2**62)}, f"policy_version -{2**62}; "),
}
"""What each stream must refuse, and what is said."""


def broken(item, ids=None, logp=None, version=0):
    """The sample with another last token, log-probability or version."""
    logps = list(item.actor_logps.token_logps)
    tokens = [*item.input_ids[:-1], item.input_ids[-1] if ids is None else ids]
    attachments = SampleAttachments(ActorTokenLogps([*logps[:-1], logps[-1] if logp is None else logp]))
    return replace(item, input_ids=tokens, attachments=attachments, meta={**item.meta, "policy_version": version})


def trainer_of(source, **settings):
    cfg = TrainerConfig(model_device="cpu", max_seq_len=64, micro_token_budget=256, **settings)
    return Trainer(model=tiny_model(), algo=make_grpo(group_size=4), batch_source=source, cfg=cfg)


class Given:
    """A user's source."""

    def __init__(self, items):
        self.items = items

    async def next_batch(self):
        return SAWBatch(list(self.items))


def as_arrays(batch):
    return decode_batch(*encode_batch(batch)).items


@pytest.mark.parametrize("wrapped", [lambda source: source, OverlappedSource, SharedBatches])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_sample_of_a_users_source_that_cannot_be_trained_on_is_named(fault, wrapped):
    changes, said = FAULTS[fault]
    items = sorting_items(8)
    items[5] = broken(items[5], **changes)
    for given in (items, as_arrays(SAWBatch(items))):
        with pytest.raises(DataError, match=f"sample r5/0 has .*{said}"):
            trainer_of(wrapped(Given(given))).train_step_sync()
    trainer_of(wrapped(Given(sorting_items(8)))).train_step_sync()


class Answering:
    """Two good answers, then one with the fault, in turn."""

    def __init__(self, ids=3, logp=-0.5, version=0):
        self.answers = [(3, -0.5, 0), (4, 1e-4, 0), (ids, logp, version)]
        self.calls = 0

    async def complete(self, request):
        ids, logp, version = self.answers[self.calls % 3]
        self.calls += 1
        return ChatResponse("x", [ids], [logp], "stop", [5, 6]), {"policy_version": version}


class Quiz(SingleAgentEnv):
    def env_reset(self, *, seed=None):
        return "q", {}

    def env_step(self, action):
        return StepOutcome("", 1.0, False, True, {})

    def env_current_obs(self):
        return "q"


@pytest.mark.parametrize("fault", FAULTS)
def test_an_episode_with_tokens_that_cannot_be_trained_on_fails_alone(fault):
    changes, said = FAULTS[fault]
    client = Answering(**changes)
    engine = RolloutEngine(env_registry={"quiz": Quiz}, protocol_registry={"p": lambda: protocol(client)}, max_retries=0)
    requests = [
        RolloutRequest(EnvSpec("quiz"), ProtocolSpec("p"), inference=FOR_RL, meta={"group_id": str(index)}) for index in range(6)
    ]
    source = RolloutBatchSource(engine=engine, requests_fn=lambda: requests, credit_assigner=EpisodicReturn(), concurrency=1)
    stats = trainer_of(source).train_step_sync()
    assert (stats["train/num_failed_episodes"], stats["train/num_samples"]) == (2, 4)
    client.answers = client.answers[2:] * 3
    with pytest.raises(RolloutError, match=said):
        trainer_of(source).train_step_sync()


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_entry_that_cannot_be_trained_on_is_set_aside_once(fault):
    """A trainer that comes back does not fail of it again."""
    changes, said = FAULTS[fault]
    log, items = MemoryLog(lambda: 0.0), [replace(each, meta={**each.meta, "request_meta": {}}) for each in sorting_items(9)]
    for number, item in enumerate(items):
        assert log.push(entry_of(number, broken(item, **changes) if number == 2 else item), max_entries=99)
    source = PipelineBatchSource("", batch_size=4, log=log, poll_timeout=0.001)
    trainer = trainer_of(OverlappedSource(source, max_lag=0))
    await trainer.train(1)
    state = source.state_dict()
    resumed = PipelineBatchSource("", batch_size=4, log=log, poll_timeout=0.001)
    resumed.load_state_dict(state)
    await trainer_of(resumed).train(1)
    [aside] = log.aside()
    assert re.search(said, aside.reason)
    assert resumed.state_dict()["producers"] == {"p": 8}


def entry_of(number, item):
    """The entry of an actor that checks nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampleCheck, "find_fault", lambda *_: None)
        return encode_samples(SampleGroup("p", number, [item]))


def test_a_check_of_no_trainer_knows_no_vocabulary_and_no_version():
    check = SampleCheck()
    assert check.find_fault({"policy_version": 2**31 - 1}, int_column([2**31 - 1]), float_column([1e-3, -1e38])) is None
    assert check.find_fault({"policy_version": np.int64(3)}, [0]) is None
    assert "no id below 0" in check.find_fault({}, [3, -1])
    assert check.find_fault({}, []) == "no tokens"
    for logp, said in [
        (np.nan, "nan; it must be finite"),
        (-1e39, "-1e+39; it must be finite"),
        (2e-3, "0.002; it must be at most 0"),
    ]:
        assert f"the log-probability {said}" in check.find_fault({}, [1], np.array([-1.0, logp]))
    for version in (-1, 1.5, "3", 2**31):
        assert f"policy_version {version!r}" in check.find_fault({"policy_version": version})


def test_samples_of_a_trainer_that_was_further_are_trained():
    items = [replace(each, meta={**each.meta, "policy_version": MAX_LATER_VERSIONS}) for each in sorting_items(8)]
    asyncio.run(trainer_of(Given(items)).train(1))
