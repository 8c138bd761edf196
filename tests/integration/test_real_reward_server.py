"""A real vLLM pooling server: its scores equal transformers in float32, and it refuses and updates
as the client expects."""

import asyncio
import json
import os
import random
from copy import deepcopy

import pytest
import torch
from reward_models import EOS, reward_model, score_alone

from ludic.distributed import create_rm_publisher
from ludic.errors import ConfigError, DataError, InferenceError
from ludic.inference import LocalRewardModel, ScoringRequest
from ludic.inference.vllm.scoring import VLLMScoringClient
from ludic.models.byte_tokenizer import make_byte_tokenizer

pytestmark = pytest.mark.integration
READY_S = 540.0
WORKER = "ludic.inference.vllm.in_server.worker.WeightWorker"
WEIGHT_FLAGS = ["--worker-extension-cls", WORKER, "--weight-transfer-config", '{"backend": "gloo"}']


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(URL, the same model in this process)."""
    if not os.environ.get("LUDIC_VLLM_PYTHON"):
        pytest.skip("LUDIC_VLLM_PYTHON names no interpreter with vLLM; `make vllm` builds one")
    from ludic.inference.servers.ports import free_port
    from ludic.inference.vllm.launch import start_vllm_server, stop_vllm_server, wait_for_vllm_health

    folder, log, port = tmp_path_factory.mktemp("reward_model"), tmp_path_factory.mktemp("vllm") / "server.log", free_port()
    model = reward_model(seed=21)
    model.save_pretrained(folder)
    make_byte_tokenizer().save_pretrained(folder)
    proc = start_vllm_server(
        str(folder),
        "127.0.0.1",
        port,
        served_model_name="rm",
        extra_args=["--runner", "pooling", "--max-model-len", "128", *WEIGHT_FLAGS],
        env={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
        log_path=log,
    )
    try:
        wait_for_vllm_health("127.0.0.1", port, proc, timeout_s=READY_S)
        yield f"http://127.0.0.1:{port}", model
    finally:
        stop_vllm_server(proc)


def client(served, **settings):
    return VLLMScoringClient(served[0], tokenizer=make_byte_tokenizer(), **settings)


def sequences(count, longest):
    """Ids of the whole vocabulary, including padding and end tokens, some of them at the end."""
    rng = random.Random(0)
    made = [[rng.randrange(272) for _ in range(rng.randrange(1, longest))] for _ in range(count)]
    return [*made, [53, 46, EOS], [53, 46, 0], [53, 46]]


async def test_scores_equal_those_of_transformers_and_of_the_local_engine(served):
    asked = sequences(120, 128)
    async with client(served) as using:
        got = await using.score_batch(asked, normalize=False)
        again = await using.score_batch(asked, normalize=False)
        alone = [(await using.score_batch([ids], normalize=False))[0] for ids in asked[:10]]
    expected = [score_alone(served[1], ids) for ids in asked]
    assert max(expected) - min(expected) > 1
    assert got == pytest.approx(expected, abs=1e-4)
    assert got == pytest.approx(await LocalRewardModel(served[1]).score_batch(asked, normalize=False), abs=1e-4)
    assert again == pytest.approx(got, abs=1e-5)  # what shares a forward pass depends on when requests arrive
    assert alone == pytest.approx(got[:10], abs=1e-4)


async def test_text_is_scored_by_its_ids_and_normalised_as_locally(served):
    ids = list(make_byte_tokenizer()("2+2=4")["input_ids"])
    async with client(served) as using:
        text, tokens = await using.score_batch(["2+2=4", ids], normalize=False)
        [normalised] = await using.score_batch([ids])
    assert text == pytest.approx(tokens, abs=1e-5)  # each request has a forward pass of its own, or shares one
    assert normalised == pytest.approx(torch.tensor(tokens).sigmoid().item(), abs=1e-5)


@pytest.mark.parametrize("ids", [[], [272], [5] * 129])
async def test_invalid_inputs_are_refused(served, ids):
    async with client(served) as using:
        with pytest.raises(DataError):
            await using.score_batch([[5], ids])
        assert len(await using.score_batch([[5] * 128])) == 1


async def test_the_server_reports_its_model_and_refuses_others(served):
    async with client(served) as using:
        info = await using.get_server_info()
        assert (info["models"], info["max_model_len"], info["url"]) == (["rm"], 128, served[0])
        assert await using.get_reward_model_version() == 0
    async with client(served, model="other") as using:
        with pytest.raises(InferenceError, match="other"):
            await using.score_batch([[5]])


def test_the_model_has_one_label(served):
    with pytest.raises(ConfigError, match="1 labels"):
        client(served).score_sync(ScoringRequest.from_list("rm", [[5]], n_labels=2))


async def test_many_concurrent_calls_give_the_same_scores(served):
    asked = sequences(64, 40)
    async with client(served) as using:
        together = await using.score_batch(asked, normalize=False)
        parts = await asyncio.gather(*(using.score_batch([ids], normalize=False) for ids in asked))
    assert [score for [score] in parts] == pytest.approx(together, abs=1e-4)
    assert json.dumps(together)  # plain numbers


async def scores_at(served, asked):
    async with client(served) as using:
        return await using.score_batch(asked, normalize=False)


async def version_at(served):
    async with client(served) as using:
        return await using.get_reward_model_version()


@pytest.mark.parametrize("mode", ["head_only", "full"])
def test_published_weights_are_used_for_scoring(served, mode):
    """Long sequences with a common prefix, so that a prefix cache of the old weights would show."""
    asked = [[*range(3, 100), token] for token in (5, 6, 7)]
    trained = deepcopy(served[1])
    torch.manual_seed(3)
    with torch.no_grad():
        for name, weight in trained.named_parameters():
            if mode == "full" or name.startswith("score."):
                weight.add_(0.1 * torch.randn_like(weight))
    before = asyncio.run(scores_at(served, asked))
    using = client(served)
    publisher = create_rm_publisher(using, training_mode=mode)
    try:
        publisher.publish(dict(trained.named_parameters()), version=5)
        assert asyncio.run(version_at(served)) == 5
        after = asyncio.run(scores_at(served, asked))
        assert after == pytest.approx([score_alone(trained, ids) for ids in asked], abs=1e-4)
        assert max(abs(new - old) for new, old in zip(after, before, strict=True)) > 0.05
    finally:
        publisher.publish(dict(served[1].named_parameters()), version=6)
        using.close_communicator()
    assert asyncio.run(scores_at(served, asked)) == pytest.approx(before, abs=1e-4)
