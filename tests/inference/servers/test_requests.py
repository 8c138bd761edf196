"""The request body for servers with OpenAI's API."""

from ludic.inference import ChatCompletionRequest, ReturnSpec, SamplingParams, ToolRequest
from ludic.inference.request import chat_fields, request_body
from ludic.inference.servers.openai_client import OpenAIChatClient
from ludic.inference.vllm.requests import TokenRequest, chat_arguments

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
REQUEST = ChatCompletionRequest(
    "m",
    [{"role": "user", "content": "2+2="}],
    SamplingParams(0.5, 9, stop="\n", top_k=5, min_p=0.1, repetition_penalty=1.2),
    ReturnSpec.for_rl(top_logprobs_k=2),
    seed=7,
    tools=ToolRequest([TOOL]),
)


def test_both_clients_send_the_same_fields_for_the_same_request():
    shared = chat_fields(REQUEST)
    assert set(shared) > {"model", "messages", "temperature", "stop", "seed", "tools", "tool_choice"}
    for arguments in (chat_arguments(REQUEST), OpenAIChatClient("http://127.0.0.1:1/v1")._arguments(REQUEST)):
        body = request_body(arguments)
        assert request_body(shared).items() <= body.items()
        assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (5, 0.1, 1.2)


def test_token_requests_have_them_too():
    body = TokenRequest("m", [5, 6], REQUEST.sampling).generate_body()["sampling_params"]
    assert (body["top_k"], body["min_p"], body["repetition_penalty"], body["stop"]) == (5, 0.1, 1.2, "\n")


def test_fields_of_the_extra_body_override_those_of_the_request():
    arguments = {"model": "m", "seed": 1, "extra_body": {"seed": 2, "top_k": 3}, "extra_headers": {"X-A": "b"}}
    assert request_body(arguments) == {"model": "m", "seed": 2, "top_k": 3}


def test_the_body_of_a_request_without_extras_is_its_arguments():
    assert request_body({"model": "m"}) == {"model": "m"}
