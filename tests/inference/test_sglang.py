"""The SGLang client against a stub: exact ids, log-probabilities and weight versions."""

import json

import pytest
from chat_tokenizers import CHATML, chat_tokenizer
from safetensors.torch import save_file
from stub_sglang import StubSGLang
from stub_weight_server import weights
from tiny_vision import IMAGE, make_picture, make_tiny_vision

from ludic.columns import Column
from ludic.errors import ConfigError, ConfigTypeError, InferenceError
from ludic.images.content import image_part
from ludic.inference import ChatCompletionRequest, ReturnSpec, SamplingParams, VLLMExtensions
from ludic.inference.prompts.encoder import PromptEncoder
from ludic.inference.prompts.template import Dialogue
from ludic.inference.sglang import SGLangClient
from ludic.types import TRACE_KEYS, ImageSpan, stored

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def server(tmp_path):
    save_file(weights(0), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    tokenizer = chat_tokenizer(CHATML)
    ids = [*tokenizer.encode("yes", add_special_tokens=False), tokenizer.eos_token_id]
    with StubSGLang(tmp_path, sampled=ids) as running:
        running.finish = {"type": "stop", "matched": tokenizer.eos_token_id}
        yield running


def ask(messages=MESSAGES, **more):
    return ChatCompletionRequest(
        "policy", messages, SamplingParams(0.7, 8, stop=["#"], top_k=9), ReturnSpec.for_rl(), seed=4, **more
    )


async def test_ids_are_sent_and_returned_with_log_probabilities_and_the_version(server):
    tokenizer = chat_tokenizer(CHATML)
    client = SGLangClient(server.url, tokenizer=tokenizer)
    server.version = "17"
    response, info = await client.complete(ask())
    assert {type(stored(response, name)) for name in TRACE_KEYS} == {Column}
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert response.text == "yes"
    assert (response.prompt_token_ids, response.completion_token_ids) == (prompt, server.sampled)
    assert response.completion_logprobs == [-0.5, -1.5, -2.5, -3.5]
    assert (response.finish_reason, info["policy_version"]) == ("stop", 17)
    ((_, body),) = server.calls
    assert body["input_ids"] == prompt
    wanted = {"max_new_tokens": 8, "temperature": 0.7, "top_p": 1.0, "top_k": 9, "stop": ["#"], "sampling_seed": 4}
    assert wanted.items() <= body["sampling_params"].items()
    await client.aclose()


async def test_token_ids_are_continued_unchanged(server):
    client = SGLangClient(server.url)
    trace = await client.complete_tokens([9, 9, 9], sampling=SamplingParams(max_tokens=2))
    assert (trace.prompt_token_ids, trace.completion_token_ids) == ([9, 9, 9], server.sampled[:2])
    await client.aclose()


async def test_an_aborted_request_is_not_an_answer(server):
    client = SGLangClient(server.url, max_retries=1, backoff_s=0.0)
    server.finish = {"type": "abort"}
    with pytest.raises(InferenceError, match="aborted"):
        await client.complete_tokens([9])
    assert len(server.calls) == 2
    await client.aclose()


async def test_responses_without_log_probabilities_are_errors(server):
    client = SGLangClient(server.url, max_retries=0)
    generated = server._generated
    server._generated = lambda body: generated({**body, "return_logprob": False})
    with pytest.raises(InferenceError, match="4 token ids with log-probabilities of 0"):
        await client.complete_tokens([9])
    server._generated = lambda body: {"choices": []}
    with pytest.raises(InferenceError, match="missing required field `meta_info`"):
        await client.complete_tokens([9])
    await client.aclose()


async def test_an_answer_around_a_push_has_its_oldest_version(server):
    client = SGLangClient(server.url)
    server.sampled, server.finish = [5, 6, 7], {"type": "length", "length": 3}
    server.spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    sampled = await client.sample_tokens([9], sampling=SamplingParams(max_tokens=3))
    assert (sampled.policy_version, sampled.weight_versions) == (3, server.spans)
    server.spans = [{"version": "3", "start": 0, "end": 4}]
    with pytest.raises(InferenceError, match="must lie within 3 tokens"):
        await client.sample_tokens([9], sampling=SamplingParams(max_tokens=3))
    await client.aclose()


async def test_servers_that_report_one_version_have_it_for_all_tokens(server):
    client, generated = SGLangClient(server.url), server._generated
    server.version = "7"

    def without_spans(body):
        answer = generated(body)
        del answer["meta_info"]["weight_versions"]
        return answer

    server._generated = without_spans
    sampled = await client.sample_tokens([9], sampling=SamplingParams(max_tokens=2))
    assert (sampled.policy_version, sampled.weight_versions) == (7, [{"version": "7", "start": 0, "end": 2}])
    await client.aclose()


async def test_an_answer_that_ended_for_nan_is_an_error(server):
    """SGLang then puts the end token in the place of the sampled id, with its log-probability."""
    client = SGLangClient(server.url, max_retries=0)
    server.finish = {"type": "stop", "matched": "NaN happened"}
    with pytest.raises(InferenceError, match="'NaN happened', which is no stop string"):
        await client.complete_tokens([9], sampling=SamplingParams(stop=["#"]))
    server.finish = {"type": "stop", "matched": "#"}
    sampled = await client.sample_tokens([9], sampling=SamplingParams(stop=["#"]))
    assert not sampled.ended
    await client.aclose()


async def test_unsupported_settings_are_refused(server):
    with pytest.raises(ConfigError, match="tokenizer"):
        await SGLangClient(server.url).complete(ask())
    client = SGLangClient(server.url, tokenizer=chat_tokenizer(CHATML))
    with pytest.raises(ConfigTypeError, match="VLLMChatClient"):
        await client.complete(ask(extensions=VLLMExtensions()))
    with pytest.raises(InferenceError, match="create_checkpoint_publisher"):
        client.sync_weights({})


async def test_images_are_sent_as_data_urls_with_one_marker_each(server):
    _, processor = make_tiny_vision("qwen2_vl")
    digest = processor.store.add(make_picture(16, 16))
    client = SGLangClient(server.url, tokenizer=processor.tokenizer, max_retries=0)
    ids = [5, *[IMAGE] * 4, 6]
    span = ImageSpan(digest, 1, 4)
    server.prompt_tokens, server.sampled = len(ids), [5, 6]
    trace = await client.complete_tokens(ids, images=[span], sampling=SamplingParams(max_tokens=2))
    assert (trace.prompt_token_ids, trace.images) == (ids, (span,))
    ((_, body),) = server.calls
    assert (body["input_ids"], body["image_data"]) == ([5, IMAGE, 6], [processor.store.data_url(digest)])
    assert set(body["sampling_params"]["logit_bias"].values()) == {-100.0}
    content = [image_part(digest), {"type": "text", "text": "?"}]
    server.prompt_tokens = len(
        PromptEncoder(processor.tokenizer, processor).encode(Dialogue([{"role": "user", "content": content}])).ids
    )
    response, _ = await client.complete(ask(messages=[{"role": "user", "content": content}]))
    assert [each.length for each in response.to_trace().images] == [4]
    server.prompt_tokens = 3  # of an image that was written out otherwise, or not at all
    with pytest.raises(InferenceError, match="SGLANG_MM_AVOID_RETOKENIZE"):
        await client.complete_tokens(ids, images=[span])
    server.prompt_tokens, server.sampled = len(ids), [5, IMAGE]
    with pytest.raises(InferenceError, match=rf"sampled \[{IMAGE}\], tokens of images"):
        await client.complete_tokens(ids, images=[span])
    with pytest.raises(ConfigError, match="reads text alone"):
        await SGLangClient(server.url).complete_tokens(ids, images=[span])
    await client.aclose()
