"""Agents of other libraries, as they are, in place of the built-in one of `ludic train errand`.

In this folder, after `pip install openai-agents 'pydantic-ai-slim[openai]'`:

    ludic train errand agent=agent_libraries:openai_agents
    ludic train errand agent=agent_libraries:pydantic_ai

The library gets a client of the session. Nothing else of it changes, and a program of yours that
uses it can be trained in the same way.
"""

from ludic.inference.gateway.session import Session


async def openai_agents(session: Session) -> str:
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    @function_tool
    def look(key: str) -> str:
        """Look a key up."""
        return session.row["store"].get(key, "nothing")

    model = OpenAIChatCompletionsModel(session.model, session.client())
    result = await Runner.run(Agent("errand", tools=[look], model=model), session.prompt, max_turns=4)
    return str(result.final_output)


async def pydantic_ai(session: Session) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(session.model, provider=OpenAIProvider(openai_client=session.client()))
    agent = Agent(model)

    @agent.tool_plain
    def look(key: str) -> str:
        """Look a key up."""
        return session.row["store"].get(key, "nothing")

    return (await agent.run(session.prompt)).output
