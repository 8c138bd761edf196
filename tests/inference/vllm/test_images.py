"""Images in requests to a stub that reads `content_parts` as vLLM 0.32 does."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from stub_vllm import StubVLLM
from stub_vllm_sampling import GENERATE
from tiny_vision import IMAGE, VIDEO, make_picture, make_tiny_vision, make_tokenizer

from ludic.errors import ConfigError, InferenceError, ServerError
from ludic.images.content import image_part
from ludic.images.store import digest_of, use_store
from ludic.inference import ChatCompletionRequest, ReturnSpec, SamplingParams, VLLMChatClient
from ludic.inference.extensions import VLLMExtensions
from ludic.inference.prompts.encoder import PromptEncoder
from ludic.inference.prompts.template import Dialogue
from ludic.types import ImageSpan


@pytest.fixture
def processor():
    return make_tiny_vision("qwen2_vl")[1]


@pytest.fixture
def server(processor):
    with NeverPlaceholders() as stub:
        stub.placeholder = processor.placeholder_id
        stub.count_placeholders = lambda data: processor.process(digest_of(data)).num_placeholders
        yield stub


class NeverPlaceholders(StubVLLM):
    def sample(self, prompt, **settings):
        ids, *others = super().sample(prompt, **settings)
        return [token if token == self.eos_id else token % 250 for token in ids], *others


def add(processor, seed, size=(16, 16)):
    return processor.store.add(make_picture(*size, seed=seed))


def user(*parts):
    return {"role": "user", "content": [image_part(p) if len(p) == 32 else {"type": "text", "text": p} for p in parts]}


def ask(*messages, seed=0, **sampling):
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return ChatCompletionRequest("tiny", list(messages), params, ReturnSpec.for_rl(), seed=seed)


def run(server, processor, scenario, **settings):
    async def whole():
        given = {"tokenizer": processor.tokenizer, "backoff_s": 0.0, "max_retries": 0, **settings}
        async with VLLMChatClient(port=server.port, **given) as client:
            return await scenario(client)

    return asyncio.run(whole())


def sent_images(server):
    """The digests whose bytes were sent, in order."""
    parts = [part for body in server.bodies(GENERATE) for part in body.get("content_parts", ())]
    return [part["uuid"] for part in parts if part["url"] is not None]


def test_the_server_writes_images_out_and_must_read_the_ids_that_were_encoded(server, processor):
    first, wide = add(processor, 0), add(processor, 1, (32, 16))
    messages = [user("Is ", first, " in ", wide, "?")]
    expected = PromptEncoder(processor.tokenizer, processor).encode(Dialogue(messages))
    response, _ = run(server, processor, lambda client: client.complete(ask(*messages)))
    trace = response.to_trace()
    assert (trace.prompt_token_ids, trace.images) == (expected.ids, expected.images)
    body = server.bodies(GENERATE)[-1]
    assert body["token_ids"].count(processor.placeholder_id) == 2
    assert body["sampling_params"]["logit_bias"] == {str(IMAGE): -100.0, str(VIDEO): -100.0}
    assert body["content_parts"] == [{"type": "image_url", "url": None, "uuid": digest} for digest in (first, wide)]
    continued = run(server, processor, lambda client: client.complete_tokens(expected.ids, images=expected.images, seed=0))
    assert (continued.prompt_token_ids, continued.images) == (expected.ids, expected.images)


def test_the_bytes_of_an_image_are_sent_once_a_server_and_once_more_after_a_restart(server, processor):
    digests = [add(processor, seed) for seed in range(3)]
    groups = [[user(digest, "?")] for digest in digests[:2]] + [[user(digests[0], digests[2], "?")]]

    async def scenario(client):
        async def play():
            await asyncio.gather(*(client.complete(ask(*messages, seed=seed)) for messages in groups for seed in range(8)))

        await play()
        once = sorted(sent_images(server))
        await play()
        assert sorted(sent_images(server)) == once
        server.images.clear()
        await play()
        return once

    once = run(server, processor, scenario)
    assert once == sorted(digests)
    assert sorted(sent_images(server)) == sorted(2 * digests)


def test_a_forgotten_image_is_sent_again_beside_a_new_one(server, processor):
    """As in the later turns of an episode on a server that was restarted, or that kept fewer."""
    old, new = add(processor, 0), add(processor, 1)

    async def scenario(client):
        await client.complete(ask(user(old, "?")))
        server.images.clear()
        await asyncio.gather(*(client.complete(ask(user(old, new, "?"), seed=seed)) for seed in range(4)))

    run(server, processor, scenario)
    assert sorted(set(sent_images(server))) == sorted([old, new])
    assert sent_images(server).count(old) == 2


def test_an_image_that_did_not_arrive_is_sent_by_the_next_request(server, processor):
    digest = add(processor, 0)
    server.fail(GENERATE, (500, {"error": {"message": "busy"}}))

    async def scenario(client):
        asked = (client.complete(ask(user(digest, "?"), seed=seed)) for seed in range(4))
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = run(server, processor, scenario)
    assert [isinstance(answer, InferenceError) for answer in answers].count(True) == 1
    assert sent_images(server) == [digest, digest]


def test_a_server_that_keeps_no_images_gets_the_bytes_with_each_request(server, processor):
    digest = add(processor, 0)
    read = server._read_images

    def forget(ids, parts):
        server.images.clear()
        return read(ids, parts)

    server._read_images = forget
    response, _ = run(server, processor, lambda client: client.complete(ask(user(digest, "?"))))
    assert response.to_trace().images


@pytest.mark.parametrize("more", [1, -1])
def test_another_number_of_placeholders_is_one_line_and_no_sample(server, processor, more):
    first, second = add(processor, 0), add(processor, 1, (32, 16))
    count = server.count_placeholders
    server.count_placeholders = lambda data: count(data) + (more if digest_of(data) == second else 0)
    with pytest.raises(InferenceError, match=rf"at image 2 of 2 \({second}, 8 tokens"):
        run(server, processor, lambda client: client.complete(ask(user(first, second))))


def test_a_sampled_placeholder_is_refused(server, processor):
    server.eos_id = IMAGE  # drawn as end tokens are
    request = ask(user(add(processor, 0)), max_tokens=200)
    with pytest.raises(InferenceError, match=r"sampled \[259\], tokens of images"):
        run(server, processor, lambda client: client.complete(request))


@pytest.mark.parametrize("scale_out", [True, False])
def test_the_biases_of_a_request_are_beside_those_of_the_placeholders(server, processor, scale_out):
    server.scale_out = scale_out
    extensions = VLLMExtensions(extra_body_overrides={"logit_bias": {65: 2.0, str(IMAGE): 3.0}})
    request = replace(ask({"role": "user", "content": "?"}), extensions=extensions)
    run(server, processor, lambda client: client.complete(request))
    body = server.bodies(GENERATE)[-1]["sampling_params"] if scale_out else server.bodies("/v1/completions")[-1]
    assert body["logit_bias"] == {"65": 2.0, str(IMAGE): -100.0, str(VIDEO): -100.0}


def test_without_the_token_endpoint_images_are_not_left_out(server, processor):
    server.scale_out = False
    with pytest.raises(ServerError, match="--enable-scale-out"):
        run(server, processor, lambda client: client.complete(ask(user(add(processor, 0)))))
    assert run(server, processor, lambda client: client.complete(ask({"role": "user", "content": "?"})))


def test_a_server_that_renders_gets_the_bytes_and_what_is_written_of_the_request_has_none(server, processor):
    with use_store(processor.store):
        message = user("?", processor.store.add(np.zeros((2, 2, 3), np.uint8)))
        _, info = run(server, processor, lambda client: client.complete(ask(message)), tokenizer=None)
    assert "base64" in str(server.bodies("/v1/chat/completions")[0]["messages"])
    assert info["used_args"]["messages"] == [message]


def test_spans_that_are_not_of_the_ids_are_refused(server, processor):
    digest, ids = add(processor, 0), [5, *[IMAGE] * 4, 6]

    def scenario(*spans):
        return lambda client: client.complete_tokens(ids, images=spans)

    for spans in ((), (ImageSpan(digest, 0, 4),)):
        with pytest.raises(ConfigError):
            run(server, processor, scenario(*spans))
    span = ImageSpan(digest, 1, 4)
    with pytest.raises(ConfigError, match="reads text alone"):
        run(server, processor, scenario(span), tokenizer=make_tokenizer())
    with pytest.raises(ConfigError, match="reads text alone"):
        run(server, processor, scenario(span), tokenizer=None)
    assert run(server, processor, scenario(span)).prompt_token_ids == ids
