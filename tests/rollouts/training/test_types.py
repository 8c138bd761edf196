"""Samples, batches and configurations: what is written is read back, and a wrong setting is an
error that names the remedy."""

import base64
import json

import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError, ConfigTypeError, DataError
from ludic.rollouts.training import RLTrainingConfig, RolloutBatch, RolloutConfig, Sample, SampleStatus, SFTTrainingConfig
from ludic.training.rollouts.group_filters import check_reward_nonzero_std

float32 = st.floats(-1e3, 0, width=32)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


@st.composite
def samples(draw):
    length = draw(st.integers(0, 6))
    ids, masks = st.integers(0, 2**40), st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))
    column = {"min_size": length, "max_size": length}
    return Sample(
        prompt=draw(st.one_of(texts, st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=2))),
        response=draw(texts),
        tokens=draw(st.lists(ids, **column)),
        loss_mask=draw(st.lists(masks, **column)),
        reward=draw(st.floats(-10, 10)),
        group_index=draw(st.none() | st.integers(0, 9)),
        index=draw(st.none() | st.integers(0, 9)),
        metadata=draw(st.dictionaries(texts, st.lists(st.integers(), max_size=2), max_size=2)),
        rollout_log_probs=draw(st.none() | st.lists(float32, **column)),
        status=draw(st.sampled_from(SampleStatus)),
    )


@given(samples(), st.booleans())
def test_a_sample_reads_back_what_it_wrote(sample, packed):
    data = json.loads(json.dumps(sample.to_dict(packed=packed)))
    before = json.dumps(data)
    assert Sample.from_dict(data) == sample
    assert json.dumps(data) == before


def test_a_packed_token_takes_at_most_thirteen_bytes():
    """4 + 1 + 4 bytes in base64 are 12; the keys and the other fields take what is left of 13 in a
    sample of 1,000 tokens."""
    n = 1000
    sample = Sample("2+2=", tokens=[150_000] * n, loss_mask=[1.0] * n, rollout_log_probs=[-0.123456789] * n)
    assert len(json.dumps(sample.to_dict(packed=True))) <= 13 * n
    assert Sample.from_dict(sample.to_dict(packed=True)).tokens == sample.tokens


def test_a_dictionary_shares_nothing_with_its_sample():
    sample = Sample([{"role": "user", "content": "hi"}], tokens=[1], loss_mask=[1.0], metadata={"a": [1]})
    data = sample.to_dict()
    data["prompt"][0]["content"] = "changed"
    data["metadata"]["a"].append(2)
    data["tokens"].append(2)
    read = Sample.from_dict(sample.to_dict() | {"metadata": data["metadata"]})
    data["metadata"]["a"].append(3)
    assert sample == Sample([{"role": "user", "content": "hi"}], tokens=[1], loss_mask=[1.0], metadata={"a": [1]})
    assert read.metadata == {"a": [1, 2]}


def test_a_missing_status_is_pending_and_an_unknown_key_is_left_out_with_a_warning(caplog):
    assert Sample.from_dict({"prompt": "p", "score": 1}) == Sample("p")
    assert "score" in caplog.text
    assert Sample.Status.PENDING.value == "pending"


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        ({"response": "x"}, "needs a prompt"),
        ({"prompt": "p", "status": "done"}, "pending, completed, truncated, aborted"),
        ({"prompt": "p", "tokens": {"dtype": "object", "base64": ""}}, "int32"),
        ({"prompt": "p", "tokens": {"dtype": "int32", "base64": base64.b64encode(b"abc").decode()}}, "cut short"),
        ({"prompt": "p", "tokens": {"dtype": "int32", "base64": "?"}}, "cut short"),
    ],
)
def test_a_damaged_sample_is_an_error_that_says_what_is_wrong(data, remedy):
    with pytest.raises(DataError, match=remedy):
        Sample.from_dict(data)


def test_building_a_sample_or_a_batch_checks_nothing():
    assert Sample(prompt="2+2?", tokens=[...], loss_mask=[0.0, 1.0]).tokens == [...]
    assert RolloutBatch(tokens=[[...]], loss_masks=[[...]], rewards=[1.0], response_lengths=[5]).metadata == {}


def generate(prompts):
    return [Sample(prompt) for prompt in prompts]


def test_configurations_read_back_what_they_wrote():
    sft = SFTTrainingConfig(num_steps=3, batch_size=2)
    rl = RLTrainingConfig(num_steps=3, baseline=0.5)
    rollout = RolloutConfig(4, over_sampling_factor=1.5, generate_fn=generate, reward_fn=len)
    assert SFTTrainingConfig.from_dict(json.loads(json.dumps(sft.to_dict()))) == sft
    assert RLTrainingConfig.from_dict(json.loads(json.dumps(rl.to_dict()))) == rl
    assert RolloutConfig.from_dict(json.loads(json.dumps(rollout.to_dict())), generate, reward_fn=len) == rollout
    assert "generate_fn" not in rollout.to_dict()


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: SFTTrainingConfig(0, 1), "num_steps .0. .*at least 1"),
        (lambda: SFTTrainingConfig(1, 1.5), "batch_size .1.5. must be a whole number"),
        (lambda: SFTTrainingConfig(1, True), "batch_size .True. must be a whole number"),
        (lambda: SFTTrainingConfig(1, 1, seed="a"), "seed"),
        (lambda: SFTTrainingConfig.from_dict({"num_steps": 1, "batchsize": 1}), "did you mean batch_size"),
        (lambda: RLTrainingConfig(1, sync_every=0), "sync_every .0. .*at least 1"),
        (lambda: RLTrainingConfig(1, advantage="autp"), "did you mean auto"),
        (lambda: RLTrainingConfig(1, baseline=float("nan")), "baseline"),
        (lambda: RolloutConfig(1), "needs generate_fn"),
        (
            lambda: RolloutConfig(1, generate_fn=generate, filter_fn=check_reward_nonzero_std),
            r"check_reward_nonzero_std.* n_samples_per_prompt \(1\) to be at least 2",
        ),
        (lambda: RolloutConfig(0, generate_fn=generate), "batch_size .0."),
        (lambda: RolloutConfig(1, n_samples_per_prompt=0, generate_fn=generate), "n_samples_per_prompt"),
        (
            lambda: RolloutConfig(1, over_sampling_factor=0.5, generate_fn=generate),
            r"over_sampling_factor \(0.5\) must be at least 1",
        ),
        (lambda: RolloutConfig(1, over_sampling_factor=2.5, max_lag=1, generate_fn=generate), "set max_lag=2"),
        (lambda: RolloutConfig(1, max_lag=-1, generate_fn=generate), "max_lag .-1."),
        (lambda: RolloutConfig(1, max_concurrency=0, generate_fn=generate), "max_concurrency .0."),
        (lambda: RolloutConfig(1, order="first", generate_fn=generate), "arrival, submission"),
        (lambda: RolloutConfig(1, on_exhausted="stop", generate_fn=generate), "error, short"),
        (lambda: RolloutConfig.from_dict({"batch_size": 1, "generate_fn": generate}), "argument generate_fn="),
        (lambda: RolloutConfig.from_dict({"batch_size": 1, "oversampling_factor": 2}, generate), "over_sampling_factor"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_the_remedy(make, remedy):
    with pytest.raises(ConfigError, match=remedy):
        make()


def test_a_call_in_the_place_of_a_function_is_an_error():
    with pytest.raises(ConfigTypeError, match="without calling it"):
        RolloutConfig(1, generate_fn=generate(["p"]))
