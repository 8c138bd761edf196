"""The in-process engine: tokens follow from the seed, log-probabilities are exact, and weights
change only between batches."""

import asyncio
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from playing import play, tiny_model, tokenizer

from ludic.columns import Column
from ludic.errors import ConfigError, InferenceError
from ludic.inference import ChatCompletionRequest, LocalChatClient, ReturnSpec, SamplingParams
from ludic.types import TRACE_KEYS, TokenTrace, stored


def request(text="abc", seed=0, returned=None, **sampling):
    settings = {"temperature": 1.0, "max_tokens": 8, **sampling}
    return ChatCompletionRequest(
        model="tiny",
        messages=[{"role": "user", "content": text}],
        sampling=SamplingParams(**settings),
        return_=returned or ReturnSpec.for_rl(),
        seed=seed,
    )


async def answers(client, requests):
    return [response for response, _ in await asyncio.gather(*[client.complete(r) for r in requests])]


MIXED = [
    request(text, seed, temperature=temperature, top_p=top_p, max_tokens=limit)
    for seed, (text, temperature, top_p, limit) in enumerate(
        [("a", 1.0, 1.0, 8), ("abcdef", 1.0, 1.0, 3), ("xy", 0.0, 1.0, 8), ("a longer prompt", 0.7, 0.9, 12), ("q", 2.0, 0.5, 1)]
        * 5
    )
]


def test_each_request_gets_the_tokens_of_its_seed_in_any_batch():
    client = LocalChatClient(tiny_model(), tokenizer())
    together = play(answers(client, MIXED))
    alone = [play(answers(client, [r]))[0] for r in MIXED]
    assert [r.completion_token_ids for r in together] == [r.completion_token_ids for r in alone]
    assert len({tuple(r.completion_token_ids) for r in together}) > 10  # seeds differ, and so do their tokens
    for a, b in zip(together, alone, strict=True):
        assert a.completion_logprobs == pytest.approx(b.completion_logprobs, abs=1e-4)


async def test_answers_are_arrays_until_they_are_read_and_the_same_in_json():
    """Float32 holds what the model computed, so its JSON is that of the lists."""
    client = LocalChatClient(tiny_model(), tokenizer())
    response, _ = await client.complete(request())
    trace = response.to_trace()
    assert [stored(trace, name).dtype for name in sorted(TRACE_KEYS)] == ["f4", "i4", "i4"]
    lists = json.dumps(trace.to_dict())
    assert TokenTrace.from_dict(json.loads(lists)) == response.to_trace()
    for trace in (await client.complete_tokens([5, 6], seed=1), await client.complete_tokens(np.array([5, 6]), seed=1)):
        assert {type(stored(trace, name)) for name in TRACE_KEYS} == {Column}
        assert trace.prompt_token_ids == [5, 6]


def test_log_probabilities_equal_those_of_the_models_forward_pass():
    model = tiny_model()
    for answer in play(answers(LocalChatClient(model, tokenizer()), MIXED)):
        prompt, completion = answer.prompt_token_ids, answer.completion_token_ids
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=torch.tensor([prompt + completion])).logits[0].float(), dim=-1)
        expected = [logp[len(prompt) - 1 + i, token].item() for i, token in enumerate(completion)]
        assert answer.completion_logprobs == pytest.approx(expected, abs=1e-4)


def test_processed_log_probabilities_are_those_of_the_sampling_distribution():
    model = tiny_model()
    raw, processed = (LocalChatClient(model, tokenizer(), logprobs_mode=mode) for mode in ("raw", "processed"))
    hot = [request(seed=s, temperature=0.5, max_tokens=1) for s in range(4)]
    for a, b in zip(play(answers(raw, hot)), play(answers(processed, hot)), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([a.prompt_token_ids])).logits[0, -1]
        token = a.completion_token_ids[0]
        assert a.completion_logprobs[0] == pytest.approx(torch.log_softmax(logits, -1)[token].item(), abs=1e-4)
        assert b.completion_logprobs[0] == pytest.approx(torch.log_softmax(logits / 0.5, -1)[token].item(), abs=1e-4)
    assert play(answers(processed, [request(temperature=0.0)]))[0].completion_logprobs == [0.0] * 8


def test_temperature_zero_selects_the_most_likely_token():
    model, ids = tiny_model(), None
    answer = play(answers(LocalChatClient(model, tokenizer()), [request(temperature=0.0)]))[0]
    ids = list(answer.prompt_token_ids)
    for token in answer.completion_token_ids:
        with torch.no_grad():
            assert model(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item() == token
        ids.append(token)


def test_tokens_are_sampled_with_the_models_probabilities():
    model = tiny_model(initializer_range=0.1)
    client = LocalChatClient(model, tokenizer(), max_batch_size=4096)
    draws = 4000
    got = play(answers(client, [request(seed=s, max_tokens=1) for s in range(draws)]))
    with torch.no_grad():
        p = model(input_ids=torch.tensor([got[0].prompt_token_ids])).logits[0, -1].softmax(-1).double()
    counts = torch.bincount(torch.tensor([r.completion_token_ids[0] for r in got]), minlength=259).double()
    # The chi-squared statistic has mean 258 and standard deviation about sqrt(2 * 258) = 22.7; the
    # bound is six of them above the mean.
    assert ((counts - draws * p) ** 2 / (draws * p)).sum() < 258 + 6 * 23


def test_a_completion_ends_with_its_end_token_or_at_its_limit():
    client = LocalChatClient(tiny_model(), tokenizer())
    got = play(answers(client, [request(seed=s, max_tokens=24) for s in range(64)]))
    ended = [r for r in got if r.finish_reason == "stop"]
    assert ended
    assert len(ended) < len(got)
    for r in got:
        assert (2 in r.completion_token_ids) == (r.finish_reason == "stop")
        assert 2 not in r.completion_token_ids[:-1]
        assert len(r.completion_token_ids) == len(r.completion_logprobs) <= 24
        assert r.finish_reason == "stop" or len(r.completion_token_ids) == 24


def test_a_stop_string_is_cut_from_the_text_and_the_sampled_tokens_are_kept():
    client = LocalChatClient(tiny_model(), tokenizer())
    free = play(answers(client, [request(seed=s) for s in range(32)]))
    # A seed whose completion has an ASCII character after its first character; that one is the stop
    # string.
    seed, at = next(
        (seed, i)
        for seed, r in enumerate(free)
        for i, t in enumerate(r.completion_token_ids)
        if i and ord("!") <= t - 3 <= ord("~")
    )
    ids = free[seed].completion_token_ids
    stop = chr(ids[at] - 3)
    at = ids.index(ids[at])
    cut, whole = play(answers(client, [request(seed=seed, stop=["never said", stop]), request(seed=seed)]))
    assert cut.text == free[seed].text[: free[seed].text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.completion_token_ids == ids[: at + 1]
    assert whole.completion_token_ids == ids


def test_only_requested_fields_are_returned():
    got = play(answers(LocalChatClient(tiny_model(), tokenizer()), [request(returned=ReturnSpec())]))[0]
    assert (got.prompt_token_ids, got.completion_token_ids, got.completion_logprobs) == (None, None, None)


def test_a_completion_ends_at_the_models_context_length():
    client = LocalChatClient(tiny_model(max_position_embeddings=10), tokenizer())
    got = play(answers(client, [request("1234567", max_tokens=50, seed=s) for s in range(8)]))
    assert max(len(r.completion_token_ids) for r in got) == 3
    with pytest.raises(InferenceError, match="shorten it"):
        play(answers(client, [request("1234567890")]))


@pytest.mark.parametrize(
    ("settings", "rule"), [({"temperature": -1.0}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"max_tokens": 0}, "max_tokens")]
)
def test_invalid_settings_are_refused_before_anything_runs(settings, rule):
    with pytest.raises(ConfigError, match=rule):
        play(answers(LocalChatClient(tiny_model(), tokenizer()), [request(**settings)]))


class Failing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, **_):
        raise ValueError("no such luck")


def test_a_sharded_model_is_refused_with_what_samples_instead():
    model = tiny_model()
    model.set_requires_gradient_sync = None  # as `fully_shard` leaves it
    with pytest.raises(ConfigError, match=r"is sharded; give the client a whole model"):
        LocalChatClient(model, tokenizer())


def test_a_failure_of_the_model_is_raised_for_every_request_of_the_batch():
    async def both():
        client = LocalChatClient(Failing(), tokenizer())
        return await asyncio.gather(*[client.complete(request(seed=s)) for s in range(3)], return_exceptions=True)

    errors = play(asyncio.wait_for(both(), 30))
    assert [type(e) for e in errors] == [InferenceError] * 3
    assert "no such luck" in str(errors[0])


def test_a_cancelled_request_does_not_affect_the_others():
    async def scenario():
        client = LocalChatClient(tiny_model(), tokenizer())
        tasks = [asyncio.create_task(client.complete(request(seed=s))) for s in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        again = await client.complete(request(seed=2))
        return done, again

    done, again = play(scenario())
    assert isinstance(done[1], asyncio.CancelledError)
    assert done[2][0].completion_token_ids == again[0].completion_token_ids


def test_a_client_works_in_one_event_loop_after_another():
    client = LocalChatClient(tiny_model(), tokenizer())
    first, second = (play(answers(client, [request()]))[0] for _ in range(2))
    assert first.completion_token_ids == second.completion_token_ids


class BlocksFirstPass(torch.nn.Module):
    """Blocks in its first forward pass until released."""

    def __init__(self, model):
        super().__init__()
        self.model, self.entered, self.go = model, threading.Event(), threading.Event()

    def forward(self, **keywords):
        self.entered.set()
        assert self.go.wait(30)
        return self.model(**keywords)


THREADS_LEFT = """
import asyncio, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch
from ludic.inference import LocalChatClient
from ludic.inference.local import client as module
from playing import tiny_model, tokenizer

tasks, during, decode = Path("/proc/self/task"), [], module.decode

def counted(*args, **keywords):
    torch.ones(1 << 20).exp()  # enough elements for torch to share them out
    during.append(len(list(tasks.iterdir())))
    return decode(*args, **keywords)

async def scenario():
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))  # never a second thread of the loop's own
    await asyncio.to_thread(int)  # starts that thread
    client, before = LocalChatClient(tiny_model(), tokenizer()), len(list(tasks.iterdir()))
    for _ in range(3):
        await client.complete_tokens([5, 6, 7])
    deadline = time.monotonic() + 30
    while len(list(tasks.iterdir())) > before and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    print(before, min(during), len(list(tasks.iterdir())))

module.decode = counted
torch.set_num_threads(2)
asyncio.run(scenario())
"""


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads that /proc lists")
def test_a_batch_leaks_neither_its_thread_nor_torchs_worker_threads():
    """In its own process, because threads of other tests may be ending."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", THREADS_LEFT], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    before, during, after = map(int, done.stdout.split())
    assert during == before + 2, "the thread and a worker"
    assert after == before


def test_publishing_waits_for_the_batch_that_is_being_decoded():
    slow = BlocksFirstPass(tiny_model())
    client = LocalChatClient(slow, tokenizer())
    thread = threading.Thread(target=lambda: play(client.complete(request())))
    thread.start()
    assert slow.entered.wait(30)
    with pytest.raises(TimeoutError, match="weights were not changed"):
        client.sync_weights({}, timeout_s=0.05, version=1)
    slow.go.set()
    thread.join(30)
    assert client.sync_weights({}, timeout_s=5, version=1) == "1"


def test_the_training_mode_of_the_model_is_restored():
    model = tiny_model().train()
    play(answers(LocalChatClient(model, tokenizer()), [request()]))
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


def test_the_chat_template_of_the_tokenizer_is_used():
    from ludic.models.byte_tokenizer import make_byte_tokenizer

    templated = make_byte_tokenizer()
    templated.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    got = play(answers(LocalChatClient(tiny_model(), templated), [request("hi")]))[0]
    assert templated.decode(got.prompt_token_ids) == "[user]hi>"
    plain = play(answers(LocalChatClient(tiny_model(), tokenizer()), [request("hi")]))[0]
    assert tokenizer().decode(plain.prompt_token_ids) == "hi"


def test_token_ids_are_continued_unchanged():
    client = LocalChatClient(tiny_model(), tokenizer())
    answer = play(answers(client, [request(seed=4)]))[0]
    trace = play(client.complete_tokens(answer.prompt_token_ids, sampling=request().sampling, seed=4))
    assert trace == answer.to_trace()
    odd = [tokenizer().eos_token_id, 258, 100, 100]  # no text tokenises to these ids
    assert play(client.complete_tokens(odd, sampling=SamplingParams(max_tokens=2), seed=1)).prompt_token_ids == odd


def test_equal_seeds_on_different_prompts_are_independent():
    """Groups use the same seeds. If the random stream depended on the seed alone, episodes on
    different problems would be sampled with correlated randomness."""
    model = tiny_model(initializer_range=1e-4)  # nearly uniform, so that equal randomness would give equal tokens
    got = play(answers(LocalChatClient(model, tokenizer()), [request(text, seed=1) for text in ("a", "b", "c", "d")]))
    assert len({tuple(r.completion_token_ids) for r in got}) == 4


def test_a_prompt_is_rendered_once(monkeypatch):
    from ludic.models.byte_tokenizer import make_byte_tokenizer

    templated = make_byte_tokenizer()
    templated.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    rendered = []
    monkeypatch.setattr(
        templated,
        "apply_chat_template",
        lambda messages, **_: rendered.append(messages) or "".join(m["content"] for m in messages),
    )
    client = LocalChatClient(tiny_model(), templated)
    rendered.clear()  # the client has rendered an example, to find the end of a turn
    first = play(answers(client, [request("same", seed=0)]))
    again = play(answers(client, [request("same", seed=0), request("other", seed=0)]))
    assert [m[0]["content"] for m in rendered] == ["same", "other"]
    assert again[0].completion_token_ids == first[0].completion_token_ids
    first[0].prompt_token_ids.clear()  # the caller owns the returned list
    assert play(answers(client, [request("same", seed=0)]))[0].prompt_token_ids == again[0].prompt_token_ids


def test_the_text_excludes_an_end_token_that_the_tokenizer_does_not_treat_as_special():
    model = tiny_model()
    model.generation_config.eos_token_id = [3 + byte for byte in range(256)]  # every byte is an end token
    got = play(answers(LocalChatClient(model, tokenizer()), [request(seed=s) for s in range(4)]))
    assert [(r.text, len(r.completion_token_ids), r.finish_reason) for r in got] == [("", 1, "stop")] * 4


def test_a_stop_string_is_found_across_tokens_and_late_in_the_text():
    model = tiny_model(max_position_embeddings=512)
    model.generation_config.eos_token_id = None
    free = play(answers(LocalChatClient(model, tokenizer()), [request(seed=s, max_tokens=300) for s in range(4)]))
    client = LocalChatClient(model, tokenizer())
    found = 0
    for seed, answer in enumerate(free):
        ascii_run = next(
            (
                at
                for at in range(150, len(answer.completion_token_ids) - 2)
                if all(35 <= t <= 129 for t in answer.completion_token_ids[at : at + 2])
            ),
            None,
        )
        if ascii_run is None:
            continue
        found += 1
        stop = "".join(chr(t - 3) for t in answer.completion_token_ids[ascii_run : ascii_run + 2])
        cut = play(answers(client, [request(seed=seed, max_tokens=300, stop=stop)]))[0]
        first = answer.text.index(stop)
        assert (cut.text, cut.finish_reason) == (answer.text[:first], "stop")
        assert cut.completion_token_ids == answer.completion_token_ids[: len(cut.completion_token_ids)]
    assert found
