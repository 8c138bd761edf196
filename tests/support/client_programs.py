"""Programs that call a model by the libraries that people use: `client_programs.py NAME`. Each asks
for a key that a tool looks up, then goes on in the same conversation. The libraries find the model
by the variables of their makers. Its imports are of an environment of its own (`make
accept-agents`)."""

import asyncio
import os
import sys
import tempfile

ASK, AGAIN = "find the value of a", "and again?"
SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
LOOK = {"type": "function", "function": {"name": "look", "description": "Look up a key.", "parameters": SCHEMA}}


def look(key: str) -> str:
    """Look up a key.

    Args:
        key: the key
    """
    return f"value of {key}"


def openai_chat():
    from openai import OpenAI

    client = OpenAI()
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": ASK}]}]
    for turn in range(4):
        asked = client.chat.completions.create(model="gpt-5-mini", messages=messages, tools=[LOOK], temperature=0.3, seed=1)
        said = asked.choices[0].message
        messages.append(said.model_dump(exclude_none=True) if turn % 2 else said)
        if not said.tool_calls:
            break
        messages += [{"role": "tool", "tool_call_id": call.id, "content": look("a")} for call in said.tool_calls]
    messages.append({"role": "user", "content": AGAIN})
    stream = client.chat.completions.create(
        model="x", messages=messages, tools=[LOOK], stream=True, stream_options={"include_usage": True}
    )
    print("".join(part.choices[0].delta.content or "" for part in stream if part.choices))
    print([model.id for model in client.models.list()])


def openai_responses():
    from openai import OpenAI

    client = OpenAI()
    tool = {"type": "function", **LOOK["function"]}
    first = client.responses.create(model="x", instructions="Be brief.", input=ASK, tools=[tool])
    while calls := [item for item in first.output if item.type == "function_call"]:
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": look("a")} for call in calls]
        first = client.responses.create(
            model="x", instructions="Be brief.", input=results, tools=[tool], previous_response_id=first.id
        )
    with client.responses.stream(
        model="x",
        instructions="Be brief.",
        input=[{"role": "user", "content": AGAIN}],
        tools=[tool],
        previous_response_id=first.id,
    ) as stream:
        for _ in stream:
            pass
        print(stream.get_final_response().output_text)


def anthropic_messages():
    import anthropic

    client = anthropic.Anthropic(auth_token=None)
    tools = [{"name": "look", "description": "Look up a key.", "input_schema": SCHEMA}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    given = {"model": "claude", "max_tokens": 400, "system": system, "tools": tools}
    messages = [{"role": "user", "content": ASK}]
    for _ in range(4):
        said = client.messages.create(messages=messages, **given)
        messages.append({"role": "assistant", "content": said.content})
        used = [block for block in said.content if block.type == "tool_use"]
        if not used:
            break
        messages.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": each.id, "content": look("a")} for each in used]}
        )
    with client.messages.stream(messages=[*messages, {"role": "user", "content": AGAIN}], **given) as stream:
        print("".join(stream.text_stream))
    assert client.messages.count_tokens(model="claude", messages=messages, tools=tools).input_tokens > 0


def openai_agents(api):
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    set_tracing_disabled(True)
    set_default_openai_api(api)
    agent = Agent(name="a", instructions="Be brief.", tools=[function_tool(look)], model="policy")

    async def work():
        first = await Runner.run(agent, ASK, max_turns=6)
        streamed = Runner.run_streamed(agent, [*first.to_input_list(), {"role": "user", "content": AGAIN}], max_turns=6)
        async for _ in streamed.stream_events():
            pass
        print(streamed.final_output)

    asyncio.run(work())


def pydantic_ai(kind):
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    kinds = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "anthropic": AnthropicModel}
    agent = Agent(kinds[kind]("policy"), instructions="Be brief.", tools=[look])
    first = agent.run_sync(ASK)
    print(agent.run_sync(AGAIN, message_history=first.all_messages()).output)


def langgraph(kind):
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model="policy", use_responses_api=kind == "responses", streaming=kind == "stream")
    graph = create_react_agent(model, [tool(look)], prompt="Be brief.")
    first = graph.invoke({"messages": [("user", ASK)]})
    print(graph.invoke({"messages": [*first["messages"], ("user", AGAIN)]})["messages"][-1].content)


def litellm(kind):
    from litellm import completion

    place = {"model": f"{kind}/policy"}
    if kind == "anthropic":
        place["api_base"] = os.environ["ANTHROPIC_BASE_URL"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]
    for question in (AGAIN, None):
        while True:
            said = completion(messages=messages, tools=[LOOK], max_tokens=300, **place).choices[0].message
            messages.append(said.model_dump())
            if not said.tool_calls:
                break
            messages += [
                {"role": "tool", "tool_call_id": call.id, "name": "look", "content": look("a")} for call in said.tool_calls
            ]
        if question:
            messages.append({"role": "user", "content": question})
    print(said.content)


def smolagents(kind):
    from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    if kind == "code":
        print(CodeAgent(tools=[], model=model, max_steps=4, stream_outputs=True).run(ASK))
    else:
        print(ToolCallingAgent(tools=[tool(look)], model=model, max_steps=4).run(ASK))


def mini_swe_agent():
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    model = LitellmModel(model_name="openai/policy", cost_tracking="ignore_errors", model_kwargs={"temperature": 0.0})
    agent = DefaultAgent(
        model,
        LocalEnvironment(cwd=tempfile.mkdtemp()),
        system_template="Be brief.",
        instance_template="Task: {{task}}",
        step_limit=8,
        cost_limit=0,
    )
    print(agent.run("make a file"))


if __name__ == "__main__":
    name, _, kind = sys.argv[1].partition(":")
    globals()[name](*([kind] if kind else []))
