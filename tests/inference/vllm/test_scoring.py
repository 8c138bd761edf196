"""Scores from a server: values, refusals, retries and deadlines."""

import asyncio
import math
from types import SimpleNamespace

import pytest
from chat_families import gemma_that_begins_texts
from faulty_server import CUT, HANG
from playing import tokenizer
from reward_models import rollout
from stub_reward_server import StubRewardServer
from stub_vllm import StubVLLM
from stub_vllm_sampling import DEAD

from ludic.errors import ConfigError, DataError, EngineDeadError, InferenceError, ServerUnreachableError
from ludic.inference import PoolingType, ScoringRequest, VLLMClient
from ludic.inference.vllm.scoring import VLLMScoringClient
from ludic.training import RewardModelScorer


@pytest.fixture
def server():
    with StubRewardServer(lambda ids: sum(ids) / 100) as running:
        yield running


def client(server, **settings):
    return VLLMScoringClient(server.url, **{"timeout_s": 5.0, "backoff_s": 0.001, **settings})


async def score_with(using, inputs, **options):
    async with using:
        return await using.score_batch(inputs, **{"normalize": False, **options})


async def test_scores_are_the_models_raw_scores_in_input_order(server):
    assert await score_with(client(server), [[10, 20], [5]]) == [0.3, 0.05]
    assert server.bodies("/classify") == [{"input": [[10, 20], [5]], "use_activation": False, "add_special_tokens": False}]


async def test_texts_and_ids_are_sent_in_separate_requests(server):
    ids = tokenizer()("ab")["input_ids"]
    mixed = await score_with(client(server), ["ab", ids, "a", [7]])
    assert mixed == [sum(ids) / 100, sum(ids) / 100, ids[0] / 100, 0.07]
    assert [len(body["input"]) for body in server.bodies("/classify")] == [2, 2]


async def test_text_is_sent_as_ids_that_begin_as_in_training_if_the_tokenizer_is_known(server):
    beginning = gemma_that_begins_texts()
    with pytest.raises(DataError, match="out of vocabulary"):  # the stub knows fewer ids; it was sent these
        await score_with(client(server, tokenizer=beginning), ["It is 4."])
    assert [body["input"] for body in server.bodies("/classify")] == [[beginning("It is 4.")["input_ids"]]]


async def test_special_tokens_are_added_to_text_on_request(server):
    assert await score_with(client(server, add_special_tokens=True), ["a"]) == [(1 + 100) / 100]


async def test_scores_are_normalised_locally_by_the_logistic_function(server):
    server.judge = lambda ids: {1: -800.0, 2: 0.5, 3: 800.0}[len(ids)]
    scores = await score_with(client(server), [[5], [5, 5], [5, 5, 5]], normalize=True)
    assert scores == [0.0, pytest.approx(1 / (1 + math.exp(-0.5))), 1.0]
    assert server.bodies("/classify")[0]["use_activation"] is False


async def test_a_request_names_the_model_if_it_has_a_name(server):
    await score_with(client(server, model="rm"), [[5]])
    assert server.bodies("/classify")[0]["model"] == "rm"
    with pytest.raises(InferenceError, match="`other` does not exist") as caught:
        await score_with(client(server, model="other"), [[5]])
    assert "pooling" not in str(caught.value)


async def test_a_response_reports_the_inputs_and_the_usage(server):
    async with client(server) as using:
        response, info = await using.score(ScoringRequest.from_list("default", ["ab", [7]], normalize=False))
    assert (response.model, response.usage) == ("rm", {"prompt_tokens": 3, "total_tokens": 3})
    assert response.metadata == {"pooling_type": "last", "normalize": False}
    assert len(info["raw_response"]) == len(info["used_args"]) == 2


async def test_several_labels_give_a_softmax_and_no_reward(server):
    server.judge = lambda ids: [0.0, math.log(3)]
    async with client(server) as using:
        response, _ = await using.score(ScoringRequest.from_list("rm", [[5]], n_labels=2))
        assert response.scores == [pytest.approx([0.25, 0.75])]
        with pytest.raises(ConfigError, match="2 labels"):
            await using.score_batch([[5]])
        with pytest.raises(ConfigError, match="n_labels"):
            await using.score_batch([[5]], n_labels=2)


async def test_without_inputs_no_request_is_sent(server):
    assert await score_with(client(server), []) == []
    assert server.requests == []


def test_scoring_works_outside_and_inside_a_running_loop(server):
    using, request = client(server), ScoringRequest.from_list("rm", [[10]], normalize=False)
    assert using.score_sync(request)[0].scores == [0.1]

    async def inside():
        return using.score_sync(request)[0].scores

    assert asyncio.run(inside()) == [0.1]


@pytest.mark.parametrize(
    ("ids", "message"), [([], "cannot be empty"), ([272], "out of vocabulary"), ([5] * 513, "context length is 512")]
)
async def test_a_refused_input_is_a_data_error_and_not_retried(server, ids, message):
    with pytest.raises(DataError, match=message):
        await score_with(client(server), [[5], ids])
    assert len(server.bodies("/classify")) == 1


async def test_a_sequence_that_is_too_long_fails_only_its_rollout(server):
    using = client(server, tokenizer=tokenizer())
    scorer = RewardModelScorer(using, policy_tokenizer=tokenizer(), normalize=False)
    rollouts = [rollout(str(i), ("q", "a"), ids=([5] * (513 if i == 3 else i + 1), [6])) for i in range(6)]
    async with using:
        errors = await scorer.score(rollouts)
    assert list(errors) == ["3"]
    assert [r.meta.get("rm_score") for r in rollouts] == [
        None if i == 3 else pytest.approx((5 * (i + 1) + 6) / 100) for i in range(6)
    ]
    assert all(r.meta.get("rm_score_from") == "tokens" for r in rollouts if r.id != "3")


@pytest.mark.parametrize("fault", [(503, {"detail": "later"}), (429, {"detail": "later"}), CUT])
async def test_transient_errors_are_retried(server, fault):
    server.fail("/classify", fault, fault)
    assert await score_with(client(server), [[10]]) == [0.1]
    assert len(server.bodies("/classify")) == 3


async def test_retries_are_limited(server):
    server.fail("/classify", *[(503, {"detail": "later"})] * 4)
    with pytest.raises(InferenceError, match="503"):
        await score_with(client(server, max_retries=1), [[10]])
    assert len(server.bodies("/classify")) == 2


async def test_a_silent_server_is_abandoned_at_the_deadline(server):
    server.fail("/classify", HANG, HANG)
    with pytest.raises(TimeoutError, match="no answer within"):
        await score_with(client(server, timeout_s=0.2), [[10]])


async def test_a_dead_engine_is_reported_immediately(server):
    server.fail("/classify", (500, {"error": {"message": DEAD, "type": "InternalServerError", "code": 500}}))
    with pytest.raises(EngineDeadError):
        await score_with(client(server), [[10]])
    assert len(server.bodies("/classify")) == 1


async def test_an_unreachable_server_is_reported(server):
    server.close()
    with pytest.raises(ServerUnreachableError):
        await score_with(client(server, max_retries=0), [[10]])


async def test_calls_move_from_a_dead_server_to_a_live_one(server):
    with StubRewardServer(lambda ids: -1.0) as dead:
        dead.fail("/classify", (500, {"error": {"message": DEAD}}))
        using = VLLMScoringClient([dead.url, server.url], timeout_s=5.0)
        assert await score_with(using, [[10]]) == [0.1]


async def test_a_policy_server_is_not_mistaken_for_a_reward_server():
    with StubVLLM() as policy, pytest.raises(InferenceError, match="--runner pooling"):
        await score_with(client(policy), [[10]])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "0 scores for 1 inputs"),
        ([{"index": 0, "probs": [None]}], r"got `null` - at `\$.data\[0\].probs\[0\]`"),
        ([{"index": 0, "probs": "high"}], r"got `str` - at `\$.data\[0\].probs`"),
        ([{"index": 3, "probs": [1.0]}], r"1 scores for 1 inputs \(indices 3\)"),
        (None, r"got `null` - at `\$.data`"),
    ],
)
async def test_a_response_without_scores_is_an_error_and_not_a_zero(server, data, message):
    server.fail("/classify", (200, {"data": data}))
    with pytest.raises(InferenceError, match=message):
        await score_with(client(server), [[10]])


async def test_scores_are_returned_in_input_order(server):
    def turned(answer):
        return {**answer, "data": answer["data"][::-1]}

    server.fail("/classify", turned)
    assert await score_with(client(server), [[10], [20]]) == [0.1, 0.2]


async def test_unsupported_pooling_is_refused_before_sending(server):
    with pytest.raises(ConfigError, match="pooler-config"):
        await score_with(client(server), [[5]], pooling_type=PoolingType.MEAN)
    assert await score_with(client(server, pooling_type=PoolingType.MEAN), [[5]]) == [0.05]
    with pytest.raises(ConfigError, match="reserved"):
        await score_with(client(server, pooling_type=PoolingType.STEP), [[5]])


async def test_the_client_describes_its_server(server):
    async with client(server) as using:
        info = await using.get_server_info()
        assert info == {"url": server.url, "models": ["rm"], "max_model_len": 512, "version": "0.32.0"}
        assert await using.get_reward_model_version() == 0
        server.weight_version = "7"
        assert await using.get_reward_model_version() == 7
        with pytest.raises(ConfigError, match="scoring"):
            await using.get_server_info("policy")


@pytest.fixture
def publisher_calls(monkeypatch):
    """The calls of the publisher: (URLs, settings, names, version)."""
    calls = []

    def make(urls, **settings):
        push = lambda params, version: calls.append((urls, settings, sorted(params), version))  # noqa: E731
        return SimpleNamespace(publish=push, close=lambda: calls.append("closed"))

    monkeypatch.setattr("ludic.distributed.adapters.vllm.create_vllm_publisher", make)
    return calls


def test_only_the_weights_of_the_training_mode_are_sent(server, publisher_calls):
    using, params = client(server, publisher_settings={"directory": "/d"}), {"model.norm.weight": 1, "score.weight": 2}
    assert using.sync_reward_weights(params, training_mode="head_only", version=3, timeout_s=9.0) == "3"
    assert using.sync_reward_weights(params) == "4"
    using.close_communicator()
    common = {"allow_unchanged": True, "directory": "/d"}
    assert publisher_calls == [
        ([server.url], {"partial": True, "timeout_s": 9.0, **common}, ["score.weight"], "3"),
        ([server.url], {"partial": False, "timeout_s": 600.0, **common}, ["model.norm.weight", "score.weight"], "4"),
        "closed",
        "closed",
    ]


def test_an_address_without_its_scheme_is_refused():
    with pytest.raises(ConfigError, match="http://"):
        VLLMScoringClient("127.0.0.1:8001")


# Two servers behind one client


class Policy(StubVLLM):
    def answer(self, method, path, query, body):
        return (200, {"version": "0.32.0"}) if path == "/version" else super().answer(method, path, query, body)


async def test_one_client_samples_from_one_server_and_scores_at_another(server):
    with Policy() as policy:
        using = VLLMClient(host="127.0.0.1", policy_port=policy.port, scoring_port=server.port, timeout_s=5.0)
        assert await using.score_batch([[10]], normalize=False) == [0.1]
        assert (await using.complete_tokens([5, 6])).prompt_token_ids == [5, 6]
        assert (await using.get_server_info())["models"] == ["rm"]
        assert (await using.get_server_info("policy"))["url"] == policy.url
        assert await using.get_reward_model_version() == 0
        assert (await using.score(ScoringRequest.from_list("rm", [[10]], normalize=False)))[0].scores == [0.1]
        assert using.score_sync(ScoringRequest.from_list("rm", [[10]], normalize=False))[0].scores == [0.1]
        with pytest.raises(ConfigError, match="policy"):
            await using.get_server_info("other")
        with pytest.raises(InferenceError, match="cannot push weights"):
            using.sync_reward_weights({"score.weight": 1})
        assert not using.reads_ids_of(tokenizer())
        await using.close_async_session()


async def test_a_single_port_is_a_reward_server(server):
    using = VLLMClient(host="127.0.0.1", port=server.port, scoring_tokenizer=tokenizer())
    assert await using.score_batch([[10]], normalize=False) == [0.1]
    assert using.reads_ids_of(tokenizer())
    await using.close_async_session()
