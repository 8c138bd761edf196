"""An agent of pydantic-ai, as it is, in place of the built-in one of `ludic train errand`.

In this folder, after `pip install 'pydantic-ai-slim[openai]'`:

    ludic train errand agent=with_pydantic_ai:solve agent.isolate=fork

`with_openai_agents.py` says what `agent.isolate=fork` does.
"""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from ludic.inference.gateway.session import Session


async def solve(session: Session) -> str:
    model = OpenAIChatModel(session.model, provider=OpenAIProvider(openai_client=session.client()))
    agent = Agent(model)

    @agent.tool_plain
    def look(key: str) -> str:
        """Look a key up."""
        return session.row["store"].get(key, "nothing")

    return (await agent.run(session.prompt)).output
