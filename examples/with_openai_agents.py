"""An agent of openai-agents, as it is, in place of the built-in one of `ludic train errand`.

In this folder, after `pip install openai-agents`:

    ludic train errand agent=with_openai_agents:solve agent.isolate=fork

Each episode has a process of its own, forked from one that has imported the library. In a sandbox
of bubblewrap, or with `agent.sandbox=none` without one.
"""

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

from ludic.inference.gateway.session import Session

set_tracing_disabled(True)


async def solve(session: Session) -> str:
    @function_tool
    def look(key: str) -> str:
        """Look a key up."""
        return session.row["store"].get(key, "nothing")

    model = OpenAIChatCompletionsModel(session.model, session.client())
    result = await Runner.run(Agent("errand", tools=[look], model=model), session.prompt, max_turns=4)
    return str(result.final_output)
