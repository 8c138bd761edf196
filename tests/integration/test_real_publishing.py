"""Weights pushed to a real vLLM server while it serves: it then samples from the local model's
distribution, to 1e-4."""

import asyncio
import copy
import statistics
import threading
import time

import pytest
import torch
from real_vllm import READY_S, vllm_or_skip
from served_weights import (
    CHANGED,
    CLOSE,
    generate,
    logprob_differences,
    max_difference,
    perturb,
    running_requests,
    served_version,
    weights,
)
from transformers import AutoModelForCausalLM

from ludic.distributed import VllmControlPlane, create_lora_publisher, create_vllm_publisher
from ludic.distributed.engines import VLLMEngine, sync_returned_engines, sync_weights_to_engines
from ludic.distributed.push.manifest import cast_to_server
from ludic.errors import InferenceError, PublishError
from ludic.inference import ChatCompletionRequest, ReturnSpec, SamplingParams, VLLMChatClient
from ludic.inference.vllm.endpoints import VllmEndpoints
from ludic.models.lora import LoraSettings, apply_lora
from ludic.models.published import published_weights

pytestmark = pytest.mark.integration


@pytest.fixture
def server(vllm_server_to_change):
    return vllm_server_to_change


@pytest.mark.parametrize("through", ["gloo", "disk"])
def test_after_a_push_the_server_samples_from_the_models_weights(server, tmp_path, through):
    publisher = create_vllm_publisher(server.url, directory=tmp_path if through == "disk" else None)
    for step in (1, 2):
        model = perturb(server.model, seed=step)
        publisher.publish(weights(model), version=step)
        assert max_difference(model, server) < CLOSE
        assert max_difference(server.model, server) > CHANGED
        assert generate(server)[2] == [{"version": str(step), "start": 0, "end": 32}]


@pytest.mark.parametrize("through", ["gloo", "disk"])
def test_what_changed_is_loaded_and_only_once_all_servers_can(server, tmp_path, through):
    """vLLM fuses projections and packs weights, so the receiver has the changed tensors of its own
    copy loaded. Applying a delta to that copy must not change what is served."""
    publisher = create_vllm_publisher(server.url, directory=tmp_path if through == "disk" else None)
    models = [perturb(server.model, seed=13)]
    for scale in (0.5, -0.5):
        models.append(copy.deepcopy(models[-1]))
        with torch.no_grad():
            for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
                models[-1].get_parameter(name).view(-1)[::7].add_(scale)
    publisher.publish(weights(models[0]), version=30)
    whole = publisher.pushed_bytes
    publisher.publish(weights(models[1]), version=31)
    assert 0 < publisher.pushed_bytes < whole / 5
    assert max_difference(models[1], server) < CLOSE
    assert max_difference(models[0], server) > CHANGED

    finalize = publisher.control.finalize_update

    def fails_once_staged(version):
        publisher.control.wait_staged()
        assert max_difference(models[1], server) < CLOSE
        raise PublishError("another server has no memory")

    publisher.control.finalize_update = fails_once_staged
    with pytest.raises(PublishError, match="no memory"):
        publisher.publish(weights(models[2]), version=32)
    assert (served_version(server), max_difference(models[1], server) < CLOSE) == ("31", True)
    publisher.control.finalize_update = finalize
    publisher.publish(weights(models[2]), version=32)
    assert 0 < publisher.pushed_bytes < whole / 5
    assert max_difference(models[2], server) < CLOSE
    assert max_difference(models[1], server) > CHANGED


def test_the_cache_of_old_weights_is_reset(server):
    """vLLM keeps its prefix cache over an update of weights, and would answer with keys and
    values of the old ones."""
    prompt = [10 + token % 200 for token in range(300)]
    generate(server, max_tokens=4, prompt=prompt)
    model = perturb(server.model, seed=3)
    create_vllm_publisher(server.url).publish(weights(model), version=3)
    assert max_difference(model, server, max_tokens=4, prompt=prompt) < CLOSE


def test_a_request_that_spans_a_push_reports_the_version_of_each_token(server):
    """Requests follow each other until the push is done, so that one is under way at any moment."""
    publisher = create_vllm_publisher(server.url)
    before, after = perturb(server.model, seed=4), perturb(server.model, seed=5)
    publisher.publish(weights(before), version=4)
    answers, is_pushed = [], threading.Event()

    def generate_until_pushed():
        while not is_pushed.is_set():
            answers.append(generate(server, max_tokens=450))

    threads = [threading.Thread(target=generate_until_pushed) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        while running_requests(server) < 2:
            assert all(thread.is_alive() for thread in threads)
        publisher.publish(weights(after), version=5)
    finally:
        is_pushed.set()
        for thread in threads:
            thread.join(120)
    models = {"4": before, "5": after}
    assert any([span["version"] for span in spans] == ["4", "5"] for _, _, spans in answers)
    for ids, logprobs, spans in answers:
        for span in spans:
            tokens = logprob_differences(models[span["version"]], ids, logprobs)[span["start"] : span["end"]]
            assert len(tokens)
            assert tokens.max().item() < CLOSE  # what came before is read again with the new weights


def begin(server, count=None, shapes=None):
    """A push begun as by a trainer that then does nothing more."""
    control = VllmControlPlane(server.url, timeout_s=3.0)
    prepared = cast_to_server(weights(server.model), control.prepare(), partial=False)
    names = sorted(prepared)[:count]
    (link,) = control.links
    shapes = shapes or [list(prepared[name].shape) for name in names]
    link.begin({"names": names, "dtype_names": ["float32"] * len(names), "shapes": shapes})
    return link, prepared[names[0]]


def serves_on(server, before):
    """The weights and the version are as they were, and a new trainer can push."""
    assert served_version(server) == before
    VllmEndpoints(server.url).probe()
    model = perturb(server.model, seed=6)
    create_vllm_publisher(server.url).publish(weights(model), version=6)
    assert max_difference(model, server) < CLOSE


@pytest.mark.parametrize("death", ["its process ends", "it hangs"])
def test_a_trainer_that_dies_during_a_push_leaves_the_old_weights_served(server, death):
    before = served_version(server)
    link, first = begin(server)
    link.send(first)
    update = link._update
    if death == "its process ends":
        link.close()
    with pytest.raises(InferenceError, match="500"):
        update.result(60)
    assert max_difference(server.model, server) < CLOSE
    serves_on(server, before)


def test_a_wrong_shape_is_refused_by_the_workers_and_the_engine_survives(server):
    before = served_version(server)
    link, _ = begin(server, count=1, shapes=[[3, 3]])
    with pytest.raises(InferenceError, match="has shape"):
        link._update.result(60)
    assert max_difference(server.model, server) < CLOSE
    serves_on(server, before)


def test_weights_that_do_not_match_are_refused_before_the_server_is_contacted(server):
    publisher = create_vllm_publisher(server.url)
    short = weights(server.model)
    del short["model.norm.weight"]
    with pytest.raises(PublishError, match="missing in the push"):
        publisher.publish(short, version=7)
    with pytest.raises(PublishError, match="has shape"):
        publisher.publish({**short, "model.norm.weight": torch.ones(3)}, version=7)
    assert max_difference(server.model, server) < CLOSE


def adapt(server, seed, rank=4):
    """The server's model with adapters that change it."""
    model = apply_lora(copy.deepcopy(server.model), LoraSettings(rank=rank))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def withdraw(server):
    for name in VllmEndpoints(server.url).models():
        if "@" in name:
            VllmEndpoints(server.url).unload_adapter(name)


def test_adapters_are_served_under_a_name_with_their_version(server):
    client = VLLMChatClient(host=server.host, port=server.port)
    publisher = create_lora_publisher(client, adapt(server, 0), name="tiny", served_as="policy")
    for step in (1, 2, 3):
        publisher.model = model = adapt(server, step)
        publisher.publish({}, version=step)
        assert client.served_names["tiny"] == f"policy@{step}"
        assert max_difference(model, server, model=f"policy@{step}") < 1e-3
        assert max_difference(server.model, server) < CLOSE  # the base is as it was
        assert asyncio.run(client.get_policy_version()) == step
    assert [name for name in VllmEndpoints(server.url).models() if "@" in name] == ["policy@2", "policy@3"]
    publisher.publish({}, version=4)  # unchanged
    assert client.served_names["tiny"] == "policy@4"
    assert max_difference(model, server, model="policy@4") < 1e-3
    withdraw(server)


def test_adapters_and_merged_weights_have_the_same_log_probabilities(server, record_property):
    model = adapt(server, 21, rank=16)
    create_lora_publisher(server.url, model).publish({}, version=1)
    ids, of_adapter, _ = generate(server, model="policy@1")
    create_vllm_publisher(server.url).publish(published_weights(model), version=21)
    merged_ids, of_merged, _ = generate(server)
    assert ids == merged_ids
    difference = (torch.tensor(of_adapter) - torch.tensor(of_merged)).abs().max().item()
    print(f"\nadapter and merged push differ by at most {difference:.1e} nats")
    assert difference < 1e-3
    withdraw(server)


def test_a_name_that_comes_again_has_nothing_of_the_old_adapters_in_the_cache(server):
    """As after a kill: the resumed trainer has other adapters of the same version. Two runs are at
    the server, each under its own name."""
    prompt = [10 + token % 200 for token in range(300)]
    for seed in (31, 32):
        models = {run: adapt(server, seed + 10 * number) for number, run in enumerate(("first", "second"))}
        for run, model in models.items():
            create_lora_publisher(server.url, model, served_as=run).publish({}, version=7)
        for run, model in models.items():
            assert max_difference(model, server, max_tokens=4, prompt=prompt, model=f"{run}@7") < 1e-3
    withdraw(server)


async def test_the_client_samples_from_the_adapters_and_says_which(server):
    client = VLLMChatClient(host=server.host, port=server.port, tokenizer=server.tokenizer)
    model = adapt(server, 41)
    publisher = create_lora_publisher(client, model, name="tiny", served_as="run")
    publisher.publish({}, version=3)
    async with client:
        sampled = await client.sample_tokens([10, 11, 12], sampling=SamplingParams(1.0, 16), seed=0)
    assert (sampled.policy_version, [span["version"] for span in sampled.weight_versions]) == (3, [3])
    far = logprob_differences(model, sampled.trace.completion_token_ids, sampled.trace.completion_logprobs, [10, 11, 12])
    assert far.max().item() < 1e-3
    withdraw(server)


def test_a_server_refuses_adapters_of_a_higher_rank_with_the_reason(server):
    publisher = create_lora_publisher(server.url, adapt(server, 0, rank=32))
    assert "LoRA rank 32 is greater than max_lora_rank 16" in publisher.find_refusal()
    assert not any("@" in name for name in VllmEndpoints(server.url).models())


def test_the_client_pushes_and_every_sample_has_its_weight_version(server):
    client = VLLMChatClient(host=server.host, port=server.port, tokenizer=server.tokenizer, enable_weight_updates=True)
    model = perturb(server.model, seed=7)
    assert client.sync_weights(weights(model), version=12) == "12"
    request = ChatCompletionRequest(
        "tiny", [{"role": "user", "content": "go"}], SamplingParams(1.0, 16), ReturnSpec.for_rl(), seed=3
    )

    async def ask():
        async with client:
            return await client.complete(request)

    response, info = asyncio.run(ask())
    assert info["policy_version"] == 12
    far = logprob_differences(model, response.completion_token_ids, response.completion_logprobs, response.prompt_token_ids)
    assert far.max().item() < CLOSE
    client.close_communicator()


def test_the_duration_of_a_push_is_recorded(server, record_property):
    publisher = create_vllm_publisher(server.url)
    models = [perturb(server.model, seed=11), perturb(server.model, seed=12)]
    seconds, paused = [], []
    for push in range(10):
        began = time.perf_counter()
        publisher.publish(weights(models[push % 2]), version=push + 20)
        seconds.append(time.perf_counter() - began)
        paused.append(publisher.timings["paused_s"])
    print(
        f"\npush p50 {statistics.median(seconds):.3f} s, max {max(seconds):.3f} s, paused p50 {statistics.median(paused):.3f} s"
    )
    assert max_difference(models[1], server) < CLOSE


def test_frozen_weights_keep_their_values_and_a_tied_head_follows_its_embedding(tmp_path):
    """On a CPU vLLM multiplies with a packed copy of a tied head, which reloading leaves as it
    was. It needs a server of its own, as do frozen weights: they are those of which none was
    ever pushed."""
    vllm_or_skip()
    from types import SimpleNamespace

    from tiny_policy import make_tiny_policy, tiny_tokenizer

    from ludic.inference.servers.ports import free_port
    from ludic.inference.vllm.launch import start_vllm_server, stop_vllm_server, wait_for_vllm_health

    config = make_tiny_policy().config
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    port = free_port()
    env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    proc = start_vllm_server(
        str(tmp_path), "127.0.0.1", port, served_model_name="tiny", max_model_len=512, weights="gloo", env=env,
        log_path=tmp_path / "log",
    )  # fmt: skip
    try:
        wait_for_vllm_health("127.0.0.1", port, proc, timeout_s=READY_S)
        server = SimpleNamespace(url=f"http://127.0.0.1:{port}")
        trained = "model.layers.0.self_attn.q_proj.weight"  # which the server keeps in one tensor with those of keys and values
        new = copy.deepcopy(model)
        with torch.no_grad():
            new.get_parameter(trained).add_(1.0)
        partial = create_vllm_publisher(server.url, partial=True)
        partial.publish({trained: new.get_parameter(trained)}, version=1)
        assert max_difference(new, server) < CLOSE
        assert max_difference(model, server) > CHANGED
        new = perturb(model, seed=1)
        create_vllm_publisher(server.url).publish(weights(new), version=2)
        with pytest.raises(PublishError, match="restart the server"):
            partial.publish({trained: model.get_parameter(trained)}, version=3)
        assert max_difference(new, server) < CLOSE
        assert max_difference(model, server) > CHANGED
        (link,) = partial.control.links
        send = link.send

        def dies_mid_push(tensor):
            stop_vllm_server(proc, timeout_s=0.1)
            send(tensor)

        link.send = dies_mid_push
        with pytest.raises(PublishError, match=r"no server loaded any of it.*" + server.url):
            partial.publish(weights(model), version=4)
        with pytest.raises(PublishError, match="is the server running"):
            partial.publish(weights(model), version=5)
    finally:
        stop_vllm_server(proc)


async def test_an_engine_loads_a_checkpoint_only_if_the_others_do(server, tmp_path):
    """The server keeps its version when an engine of the user fails, and the error says so."""
    answers = iter([{"success": True}, {"success": False, "error": "the disk is full"}, {"success": True}, {"success": True}])

    class UsersEngine:
        async def update_weights_from_checkpoint(self, checkpoint_path):
            return next(answers)

    engines = [VLLMEngine(server.url), UsersEngine()]
    models = [perturb(server.model, seed=seed) for seed in (11, 12)]
    for step, model in enumerate(models):
        model.save_pretrained(tmp_path / f"step_{step}")
    first, _ = await sync_weights_to_engines(engines, tmp_path / "step_0", retries=0)
    assert (first["version"], served_version(server)) == ("step_0", "step_0")
    assert max_difference(models[0], server) < CLOSE
    with pytest.raises(PublishError, match="the disk is full") as caught:
        await sync_weights_to_engines(engines, tmp_path / "step_1", retries=0)
    assert [answer["version"] for answer in caught.value.answers] == ["step_0", "step_0"]
    assert max_difference(models[0], server) < CLOSE
    second, _ = await sync_weights_to_engines(engines, tmp_path / "step_1", retries=0)
    assert (second["version"], served_version(server)) == ("step_1", "step_1")
    assert second["fingerprint"] != first["fingerprint"]
    assert max_difference(models[1], server) < CLOSE
    assert await sync_returned_engines(engines) == [None, None]
