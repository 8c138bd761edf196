"""The requests that 14 client programs sent, once more: a call that continues an earlier one begins
with its tokens, whatever the program did to the answer.

`recordings/` has the bodies of openai 3.54, anthropic 2.12, mini-swe-agent 2.4.6, smolagents 1.26,
openai-agents 0.24, pydantic-ai 2.68, langgraph 1.2 and litellm 1.83. The model's answers are
those that came back, spelled otherwise than the template spells them.
"""

import json
from pathlib import Path

import httpx2
import pytest
from chat_tokenizers import bpe_tokenizer
from scripted_sampler import ScriptedSampler

from ludic.inference.gateway.gateway import DIALECTS, Gateway
from ludic.inference.gateway.session import Limits
from ludic.inference.prompts.transcript import canonical_message
from ludic.inference.request import SamplingParams

RECORDINGS = Path(__file__).parent / "recordings"
CONTINUED = {
    "anthropic_sdk": 4,
    "lc_chat": 3,
    "lc_responses": 3,
    "lc_stream": 3,
    "lite": 2,
    "mini_swe": 3,
    "oa_agents_chat_completions": 2,
    "oa_agents_responses": 2,
    "openai_chat": 2,
    "pyd_anthropic": 4,
    "pyd_chat": 4,
    "pyd_responses": 4,
    "smol": 0,
    "smol_code": 3,
}
ADDED = "\nCalling tools:"
"""smolagents adds what it understood to an answer."""


def read(request):
    return DIALECTS[request["path"].partition("?")[0]].read(json.dumps(request["body"]).encode(), ignore_format=True)


def written(function, *, forced):
    """A call as the model writes it; of a forced one, what follows the beginning in the prompt."""
    name, arguments = function["name"], function["arguments"]
    if forced:
        return f'{name}",   "arguments": {arguments}}}</tool_call>'
    return f'<tool_call>{{"arguments":  {arguments}, "name":"{name}"}}</tool_call>'


def answer_of(number, asks):
    """The text of the answer to a request, from the first later one that has it: calls are written
    with other spaces and another order than the template's."""
    messages = list(map(canonical_message, asks[number].messages))
    for later in asks[number + 1 :]:
        after = later.messages[len(messages) : len(messages) + 1]
        if (
            list(map(canonical_message, later.messages[: len(messages)])) == messages
            and after
            and after[0]["role"] == "assistant"
        ):
            forced = asks[number].tool_choice == "required"
            calls = [written(call["function"], forced=forced) for call in after[0].get("tool_calls") or ()]
            thought = f"<think>\n{after[0]['reasoning_content']}\n</think>\n\n" if after[0].get("reasoning_content") else ""
            return thought + str(after[0]["content"] or "").partition(ADDED)[0] + "".join(calls)
    return "fine"


@pytest.mark.parametrize("history", ["sampled", "template"])
@pytest.mark.parametrize("name", CONTINUED)
async def test_calls_of_known_programs_continue_with_the_sampled_tokens(name, history):
    """With `template`, a call after a message of the user continues none with thoughts, which the
    template drops there."""
    requests = json.loads((RECORDINGS / f"{name}.json").read_text(encoding="utf-8"))
    requests = [each for each in requests if each["path"].partition("?")[0] in DIALECTS]
    asks, tokenizer = list(map(read, requests)), bpe_tokenizer()
    number = 0
    sampler = ScriptedSampler(tokenizer, lambda *_: answer_of(number, asks))
    with Gateway(sampler, tokenizer, unsupported="ignore", history=history) as gateway:
        session = gateway.open(sampling=SamplingParams(1.0, 4000), seed=0, limits=Limits(100))
        async with httpx2.AsyncClient(trust_env=False, headers={"x-api-key": session.api_key}) as client:
            for number, request in enumerate(requests):  # noqa: B007  the script reads it
                answer = await client.post(f"{gateway.url}{request['path']}", json=request["body"])
                assert answer.status_code == 200, answer.text
        await gateway.close_session(session)
    continued = [call for call in session.calls if call.parent is not None]
    dropped = sum(call.reason == "template" for call in session.calls)
    assert len(continued) + dropped == CONTINUED[name], [call.reason for call in session.calls]
    assert history == "template" or not dropped
    assert {call.reason for call in continued} <= ({"extended"} if name == "smol_code" else {"continues"})
    for call in continued:
        parent = session.calls[call.parent].trace
        read_ids = [*parent.prompt_token_ids, *parent.completion_token_ids]
        assert call.shared >= len(read_ids) - 1
        assert call.trace.prompt_token_ids[: call.shared] == read_ids[: call.shared]


def test_every_recording_is_replayed():
    assert {path.stem for path in RECORDINGS.glob("*.json")} == set(CONTINUED)
