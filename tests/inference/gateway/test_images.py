"""Images in the calls of agents: each dialect's form gives the model the same tokens."""

import base64
import io
import json
import threading

import httpx2
import pytest
from tiny_vision import IMAGE, make_picture, make_tiny_vision

from ludic.images.content import image_part
from ludic.images.store import use_store
from ludic.inference import LocalChatClient
from ludic.inference.gateway.gateway import Gateway
from ludic.inference.request import InferenceSpec, ReturnSpec, SamplingParams
from ludic.interaction.agent_program import AgentUse
from ludic.tasks.shapes import ShapesEnv, draw_picture


def png(seed):
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(make_picture(16, 16, seed=seed)).save(buffer, "png")
    return base64.b64encode(buffer.getvalue()).decode()


def chat(data, where="user"):
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}, {"type": "text", "text": "?"}]
    return "/chat/completions", {"messages": [{"role": where, "content": parts, "tool_call_id": "c"}]}


def responses(data):
    parts = [{"type": "input_image", "image_url": f"data:image/png;base64,{data}"}, {"type": "input_text", "text": "?"}]
    return "/responses", {"input": [{"role": "user", "content": parts}]}


def anthropic(data):
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return "/messages", {
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}, text("?")]}],
        "max_tokens": 4,
    }


def text(value):
    return {"type": "text", "text": value}


@pytest.fixture
def opened():
    model, processor = make_tiny_vision("qwen2_vl")
    client = LocalChatClient(model, processor.tokenizer)
    with use_store(processor.store), Gateway(client, processor.tokenizer) as gateway:
        yield gateway, gateway.open(sampling=SamplingParams(1.0, 4), seed=3), processor


async def post(session, path, body):
    async with httpx2.AsyncClient(trust_env=False, timeout=20) as raw:
        headers = {"authorization": f"Bearer {session.api_key}"}
        return await raw.post(f"{session.base_url}{path}", json={"model": "x", **body}, headers=headers)


async def test_every_dialect_gives_the_model_the_same_image(opened):
    _, session, processor = opened
    for make in (chat, responses, anthropic):
        answer = await post(session, *make(png(0)))
        assert answer.status_code == 200, answer.text
    first, *others = session.calls
    [span] = first.trace.images
    assert span.length == 4
    for call in others:
        assert (call.trace.prompt_token_ids, call.trace.images) == (first.trace.prompt_token_ids, first.trace.images)
        assert call.messages == first.messages  # with the digest, and not the bytes
    assert first.messages == [{"role": "user", "content": [image_part(span.digest), text("?")]}]
    assert processor.store.has(span.digest)


async def test_images_are_read_beside_the_calls_of_others(opened, monkeypatch):
    """A file of 100 kB may take a second."""
    _, session, processor = opened
    threads, read = [], processor._read
    monkeypatch.setattr(processor, "_read", lambda *given: (threads.append(threading.current_thread().name), read(*given))[1])
    assert (await post(session, *chat(png(0)))).status_code == 200
    assert threads
    assert "gateway" not in threads


async def test_another_image_of_one_size_is_another_prompt_and_a_later_turn_continues(opened):
    _, session, _ = opened
    path, body = chat(png(0))
    await post(session, path, body)
    await post(session, *chat(png(1)))
    first, second = session.calls
    assert first.trace.prompt_token_ids == second.trace.prompt_token_ids
    assert first.trace.images != second.trace.images
    assert (first.trace.completion_token_ids, first.parent) != (second.trace.completion_token_ids, 0)
    more = [*body["messages"], first.answer, *chat(png(1))[1]["messages"]]
    assert (await post(session, path, {"messages": more})).status_code == 200
    later = session.calls[2]
    assert [span.digest for span in later.trace.images] == [first.trace.images[0].digest, second.trace.images[0].digest]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda body: body["messages"][0]["content"][0]["image_url"].update(url="https://a.b/c.png"), "not downloaded"),
        (lambda body: body["messages"][0]["content"][0]["image_url"].update(url="data:image/png;base64,AAAA"), "no image"),
        (lambda body: body["messages"][0].update(role="assistant"), "has an image"),
        (lambda body: body["messages"][0]["content"][0].update(type="input_audio"), "reads text and images"),
        (lambda body: body["messages"][0]["content"][0].update(image_url=None), "without its bytes"),
        (lambda body: body["messages"][0]["content"][0].update(image_url=None, source={"type": "file"}), "without its bytes"),
    ],
)
async def test_what_is_no_image_of_a_message_is_refused_by_name(opened, change, why):
    _, session, _ = opened
    path, body = chat(png(0))
    change(body)
    answer = await post(session, path, body)
    assert answer.status_code == 400
    assert why in answer.text
    assert session.calls == []


@pytest.mark.parametrize("prompt", ["<image>?", [5, IMAGE, 6]])
async def test_a_placeholder_in_a_plain_completion_is_the_fault_of_the_agent(opened, prompt):
    gateway, session, _ = opened
    answer = await post(session, "/completions", {"prompt": prompt})
    assert (answer.status_code, "1 placeholders" in answer.text) == (400, True)
    assert (await gateway.close_session(session)).error is None


async def test_an_agent_gets_the_pictures_of_the_problem_and_its_calls_have_them():
    model, processor = make_tiny_vision("qwen2_vl")
    name = "r-disc-0.1.2-4.0.0"
    env = ShapesEnv({"id": name, "question": "how many?", "answer": "2r"})
    asked = []

    async def look(session):
        asked.append((session.prompt, session.messages))
        answer = await session.client().chat.completions.create(model="x", messages=session.messages)
        return answer.choices[0].message.content

    use = AgentUse(look)
    try:
        with use_store(processor.store):
            inference = InferenceSpec(SamplingParams(1.0, 4), ReturnSpec.for_rl())
            client = LocalChatClient(model, processor.tokenizer)
            [rollout] = await use.make_protocol(client, system_prompt=None).run(env=env, max_steps=1, inference=inference)
    finally:
        use.close()
    [step], digest = rollout.steps, processor.store.add(draw_picture(name))
    assert step.prev_obs == [image_part(digest), text("how many?")]
    assert [span.digest for span in step.trace.images] == [digest]
    [(prompt, [message])] = asked
    assert prompt == f"[image 24x24 {digest[:8]}...]how many?"
    assert message["content"][0]["image_url"]["url"] == processor.store.data_url(digest)
    assert "base64" not in json.dumps(rollout.to_dict() if hasattr(rollout, "to_dict") else step.prev_obs)
