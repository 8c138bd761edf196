"""Requests that cannot be served, requests that were cancelled, and a failing model: the callers
concerned get an error, and nothing hangs."""

import asyncio
import threading

import pytest
import torch
from playing import play, tiny_model, tokenizer

from ludic.errors import ConfigError, InferenceError
from ludic.inference import ChatCompletionRequest, LocalChatClient, ReturnSpec, SamplingParams


def request(text="abc", seed=0, **sampling):
    settings = {"temperature": 1.0, "max_tokens": 8, **sampling}
    return ChatCompletionRequest(
        "tiny", [{"role": "user", "content": text}], SamplingParams(**settings), ReturnSpec.for_rl(), seed
    )


async def outcomes(client, requests, patience_s=30):
    calls = asyncio.gather(*[client.complete(r) for r in requests], return_exceptions=True)
    return await asyncio.wait_for(calls, patience_s)


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (request("x" * 64), "tokens, the context"),
        (request(""), "no token"),
        (ChatCompletionRequest("m", [{"role": "user", "content": {"not": "text"}}]), "could not be served: TypeError"),
        (ChatCompletionRequest("m", [{"role": "user", "content": object()}]), "could not be served: TypeError"),
    ],
)
def test_an_invalid_request_fails_alone(bad, rule):
    good = request(seed=3)
    first, error, last = play(outcomes(LocalChatClient(tiny_model(), tokenizer()), [good, bad, good]))
    assert isinstance(error, InferenceError)
    assert rule in str(error)
    alone = play(outcomes(LocalChatClient(tiny_model(), tokenizer()), [good]))[0]
    assert first[0].completion_token_ids == last[0].completion_token_ids == alone[0].completion_token_ids


def test_token_ids_outside_the_vocabulary_never_reach_the_model():
    client = LocalChatClient(tiny_model(), tokenizer())
    for ids in ([5, 259], [-1]):
        with pytest.raises(InferenceError, match=r"vocabulary, 0\.\.258"):
            play(client.complete_tokens(ids))


def test_a_failing_template_fails_only_its_request():
    from ludic.models.byte_tokenizer import make_byte_tokenizer

    templated = make_byte_tokenizer()
    templated.chat_template = (
        "{% for m in messages %}{{ raise_exception('odd') if m.content == 'odd' else m.content }}{% endfor %}"
    )
    good, bad = play(outcomes(LocalChatClient(tiny_model(), templated), [request("even"), request("odd")]))
    assert good[0].prompt_token_ids == [byte + 3 for byte in b"even"]
    assert isinstance(bad, InferenceError)
    assert "odd" in str(bad)


class Failing(torch.nn.Module):
    """Raises in forward pass number `at`."""

    def __init__(self, model, at):
        super().__init__()
        self.model, self.at, self.passes = model, at, 0

    def forward(self, **keywords):
        self.passes += 1
        if self.passes == self.at:
            raise ValueError("no such luck")
        return self.model(**keywords)


@pytest.mark.parametrize("at", [1, 3])
def test_a_failure_of_the_model_is_raised_for_its_batch_and_not_later(at):
    client = LocalChatClient(Failing(tiny_model(eos_token_id=None), at), tokenizer())
    requests = [request(seed=s) for s in range(5)]
    errors = play(outcomes(client, requests))
    assert [type(e) for e in errors] == [InferenceError] * 5
    assert all("ValueError: no such luck" in str(e) for e in errors)
    assert len(set(map(id, errors))) == 5  # each request needs its own exception, because raising extends the traceback
    assert not any(isinstance(o, Exception) for o in play(outcomes(client, requests)))


def test_a_model_that_returns_nan_is_an_error():
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[3 + ord("z")] = torch.nan
    bad, good = play(outcomes(LocalChatClient(model, tokenizer()), [request("z"), request("a", max_tokens=1)]))
    assert isinstance(bad, InferenceError)
    assert "not finite" in str(bad)
    assert good[0].completion_token_ids


class Gated(torch.nn.Module):
    """Blocks in every forward pass until released."""

    def __init__(self, model):
        super().__init__()
        self.model, self.entered, self.go, self.passes = model, threading.Event(), threading.Event(), 0

    def forward(self, **keywords):
        self.passes += 1
        self.entered.set()
        assert self.go.wait(30)
        return self.model(**keywords)


async def until_entered(gated):
    assert await asyncio.to_thread(gated.entered.wait, 30)


def test_a_deadline_can_pass_during_decoding_without_affecting_other_requests():
    async def scenario():
        gated = Gated(tiny_model())
        client = LocalChatClient(gated, tokenizer())
        late = asyncio.create_task(asyncio.wait_for(client.complete(request(seed=1)), 0.05))
        patient = asyncio.create_task(client.complete(request(seed=2)))
        await until_entered(gated)
        with pytest.raises(TimeoutError):
            await late
        gated.go.set()
        answer, _ = await asyncio.wait_for(patient, 30)
        return answer.completion_token_ids

    expected = play(outcomes(LocalChatClient(tiny_model(), tokenizer()), [request(seed=2)]))[0][0].completion_token_ids
    assert play(scenario()) == expected


def test_a_batch_whose_callers_are_gone_is_abandoned():
    async def scenario():
        gated = Gated(tiny_model(eos_token_id=None))
        gated.model.generation_config.eos_token_id = None
        client = LocalChatClient(gated, tokenizer())
        tasks = [asyncio.create_task(client.complete(request(seed=s, max_tokens=50))) for s in range(3)]
        await until_entered(gated)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gated.go.set()
        await outcomes(client, [request(max_tokens=1)])
        return gated.passes

    assert play(scenario()) == 2  # one pass of the batch, one of the last request


def test_cancelling_the_clients_worker_task_raises_for_every_request():
    async def scenario():
        gated = Gated(tiny_model())
        client = LocalChatClient(gated, tokenizer(), max_batch_size=2)
        tasks = [asyncio.create_task(client.complete(request(seed=s))) for s in range(5)]
        await until_entered(gated)
        for task in asyncio.all_tasks() - {asyncio.current_task(), *tasks}:
            task.cancel()
        errors = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        gated.go.set()
        return errors, await outcomes(client, [request()])

    errors, after = play(scenario())
    assert [type(e) for e in errors] == [InferenceError] * 5
    assert not isinstance(after[0], Exception)


def test_a_client_serves_event_loops_in_several_threads_at_once():
    client = LocalChatClient(tiny_model(), tokenizer(), max_batch_size=3)
    requests = [request(seed=s) for s in range(10)]
    expected = [r.completion_token_ids for r, _ in play(outcomes(client, requests))]
    got = {}

    def serve(name):
        got[name] = [r.completion_token_ids for r, _ in play(outcomes(client, requests))]

    threads = [threading.Thread(target=serve, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == dict.fromkeys(range(4), expected)


def test_a_limit_beyond_the_models_context_allocates_nothing():
    client = LocalChatClient(tiny_model(max_position_embeddings=8), tokenizer())
    answer, _ = play(outcomes(client, [request(max_tokens=10**12)]))[0]
    assert 1 <= len(answer.completion_token_ids) <= 5


@pytest.mark.parametrize("settings", [{"temperature": float("nan")}, {"temperature": float("inf")}, {"top_p": 1.5}])
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        play(LocalChatClient(tiny_model(), tokenizer()).complete(request(**settings)))


def test_the_device_setting_is_only_for_a_copy():
    with pytest.raises(ConfigError, match="copy_model=True"):
        LocalChatClient(tiny_model(), tokenizer(), device="cpu")
