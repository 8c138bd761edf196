"""Programs of the libraries that people use, as they are, against the gateway: `make accept-agents`
installs them in an environment of their own and runs these tests. Every call that continues an
earlier one begins with its tokens, and every answer that came back is continued.

The model writes calls of tools with other spaces and another order than the chat template does.
"""

import asyncio
import os
from pathlib import Path

import pytest
from chat_tokenizers import bpe_tokenizer
from scripted_sampler import ScriptedSampler

from ludic.envs import DatasetQAEnv
from ludic.inference import InferenceSpec, ReturnSpec, SamplingParams
from ludic.interaction.agent_command import AgentCommand
from ludic.interaction.agent_program import AgentUse
from ludic.recipes.agent_section import PRESETS, AgentSection, build_agent

PYTHON = os.environ.get("LUDIC_CLIENTS_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="`make accept-agents` runs it in an environment with these libraries")
PROGRAMS = Path(__file__).parents[2] / "support" / "client_programs.py"
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_CONFIGURED": "true",
    "OTEL_SDK_DISABLED": "true",
}


def call(name, arguments):
    return f'\n<tool_call>\n{{"arguments":{arguments},   "name":"{name}"}}\n</tool_call>'


def looks_twice(prompt, number):
    """Looks something up by two calls at once, then says it. The same when it is asked again."""
    asked = prompt[prompt.rindex("<|im_start|>user") :]
    if "<tool_response>" in asked or "again?" in asked:
        return "The value is  42.\n"
    return "I will look.  " + call("look", '{"key":"a"}') + call("look", '{"key": "b\\u00e9"}')


def works_in_a_shell(prompt, number):
    if number < 3:
        return "THOUGHT: try  \n" + call("bash", f'{{"command":"echo {number} > f && cat f"}}')
    return "THOUGHT: done" + call("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo done"}')


def writes_code(prompt, number):
    code = f"print({number})" if number < 3 else "final_answer('42')"
    return f"Thought: I try.\n<code>\n{code}\n</code>"


def ends_by_a_tool(prompt, number):
    """The prompt has the beginning of a call, because the program forces one."""
    assert prompt.endswith('{"name": "')
    return (
        'look",   "arguments": {"key":"a"}' if number < 2 else 'final_answer", "arguments":{"answer":"42"}'
    ) + "}\n</tool_call>"


CLIENTS = {
    "openai_chat": (looks_twice, "The value is  42."),
    "openai_responses": (looks_twice, "The value is  42."),
    "anthropic_messages": (looks_twice, "The value is  42."),
    "openai_agents:chat_completions": (looks_twice, "The value is  42."),
    "openai_agents:responses": (looks_twice, "The value is  42."),
    "pydantic_ai:chat": (looks_twice, "The value is  42."),
    "pydantic_ai:responses": (looks_twice, "The value is  42."),
    "pydantic_ai:anthropic": (looks_twice, "The value is  42."),
    "langgraph:chat": (looks_twice, "The value is  42."),
    "langgraph:stream": (looks_twice, "The value is  42."),
    "langgraph:responses": (looks_twice, "The value is  42."),
    "litellm:openai": (looks_twice, "The value is  42."),
    "litellm:anthropic": (looks_twice, "The value is  42."),
    "mini_swe_agent": (works_in_a_shell, "done"),
    "smolagents:code": (writes_code, "42"),
    "smolagents:tools": (ends_by_a_tool, "42"),
}
"""Name -> (what the model says, what the program prints of it)."""
REWRITES = {"smolagents:tools"}
"""It shows a call as text of its own, and not as it was made: each of its calls is a branch."""


def play(command, script):
    tokenizer = bpe_tokenizer()
    use = AgentUse(command, unsupported="ignore", timeout_s=240, on_error="lose", on_timeout="lose")
    protocol = use.make_protocol(ScriptedSampler(tokenizer, script), system_prompt=None)
    inference = InferenceSpec(SamplingParams(1.0, 4000), ReturnSpec.for_rl())
    row = {"prompt": "x", "question": "x", "answer": "x"}
    try:
        [rollout] = asyncio.run(protocol.run(env=DatasetQAEnv(row), max_steps=1, sampling_seed=0, inference=inference))
    finally:
        use.close()
    return rollout


@pytest.mark.parametrize("name", PRESETS)
def test_presets_play_an_episode(name, monkeypatch, tmp_path):
    """Each preset is a program that works in a shell."""
    monkeypatch.setenv("PATH", f"{Path(str(PYTHON)).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "check.py").write_text("print(int(open('f').read()) - 1)")
    section = AgentSection(preset=name, sandbox="none", env=QUIET, verify=[str(PYTHON), "{tests}/check.py"], tests=str(tmp_path))
    use = build_agent(section, context=None)
    rollout = play(use.function, works_in_a_shell)
    assert [step.info["reason"] for step in rollout.steps] == ["root", "continues", "continues", "continues"]
    assert rollout.steps[-1].info["verified"] == "1"


@pytest.mark.parametrize("name", CLIENTS)
def test_every_answer_that_came_back_is_continued(name):
    script, said = CLIENTS[name]
    rollout = play(AgentCommand([str(PYTHON), str(PROGRAMS), name], sandbox="none", env=QUIET), script)
    steps = {step.info["call"]: step for step in rollout.steps}
    assert said in rollout.meta["agent"]["output"]
    assert len(steps) >= 3
    assert rollout.meta["agent"]["undelivered"] == rollout.meta["agent"]["refused"] == 0
    reasons = [step.info["reason"] for step in rollout.steps]
    if name in REWRITES:
        assert all(reason.startswith("changed:") for reason in reasons[1:]), reasons
        return
    assert set(reasons[1:]) == {"extended" if name == "smolagents:code" else "continues"}, reasons
    for step in rollout.steps[1:]:
        parent = steps[step.info["parent"]].trace
        read = [*parent.prompt_token_ids, *parent.completion_token_ids]
        assert step.info["shared"] >= len(read) - 1
        assert step.trace.prompt_token_ids[: step.info["shared"]] == read[: step.info["shared"]]
