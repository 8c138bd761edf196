"""The section `agent` of a recipe: a program of the user's own that plays each episode."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Optional

from ludic.errors import ConfigError
from ludic.inference.gateway.session import Limits
from ludic.interaction.agent_command import SANDBOXES, AgentCommand
from ludic.interaction.agent_fork import AgentFork
from ludic.interaction.agent_program import AgentUse, find_agent
from ludic.recipes.rules import setting
from ludic.user_objects import import_named

_COMMAND = "agent.command or agent.preset"
_AGENT = f"agent.function or {_COMMAND}"
_PROCESS = f"agent.isolate or {_COMMAND}"
PRESETS: dict[str, dict[str, Any]] = {
    "mini-swe-agent": {
        "argv": ["mini", "--task", "{prompt}", "--model", "openai/{model}", "--yolo", "--exit-immediately", "--cost-limit", "0"],
        "env": {"MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"},
    },
}
"""Known programs: their commands and variables."""


@dataclass
class AgentSection:
    """A program of your own that plays each episode, and calls the model through a URL.
    `agent=module:function` is short for `agent.function=module:function`."""

    function: Optional[str] = setting(  # noqa: UP045
        None, excludes="tools or info_seed.num_seeds", hint="an agent has tools and prompts of its own"
    )
    """`module:function`, plain or a coroutine function, which gets a session (`base_url`,
    `api_key`, `prompt`, `messages`, `row`, `client()`) and returns its answer as text. Null: the
    model answers itself."""
    command: Any = field(default=None, metadata={"excludes": "agent.function or tools or info_seed.num_seeds"})
    """A program in place of a function: a list such as [python3, agent.py, "{prompt}"], with
    `{prompt}`, `{prompt_file}`, `{workspace}`, `{base_url}`, `{api_key}`, `{model}` and
    `{row.COLUMN}`. The libraries of OpenAI and Anthropic find the model by their variables."""
    preset: Optional[str] = setting(None, choices=tuple(PRESETS), excludes="agent.function or agent.command")  # noqa: UP045
    """The command and the variables of a known program: mini-swe-agent."""
    isolate: str = setting("thread", choices=("thread", "fork"), needs="agent.function")
    """`thread`: a function runs in this process. `fork`: each episode has a process of its own, as
    a command has, forked from one that has imported the module."""
    output: str = setting("stdout", needs=_COMMAND)
    """The answer of a command: `stdout`, `last_message` (of its last call), or `file:NAME`."""
    sandbox: str = setting("auto", choices=SANDBOXES, needs=_PROCESS)
    """`bubblewrap`: a command sees /usr, a folder of its own, and no network but the gateway.
    `docker`, `podman`: the same in a container of `agent.image`. `none`: it runs as you. `task`:
    in the sandbox of a terminal task. `auto`: `task` if the task has one, else bubblewrap, or with
    an image docker, else podman; an error if that is not there."""
    image: Optional[str] = setting(None, needs=_COMMAND)  # noqa: UP045
    """The image of a container for each episode, such as `python:3.12` or "{row.image}"."""
    container_args: list[str] = field(default_factory=list, metadata={"needs": "agent.image"})
    """Further arguments of `docker create` or `podman create`, such as [--memory, 16g]."""
    files: Optional[str] = setting(None, needs=_PROCESS)  # noqa: UP045
    """A folder that is copied into the folder of each episode."""
    mounts: list[str] = field(default_factory=list, metadata={"needs": _PROCESS})
    """Folders that a sandbox shows too, to read alone, such as a virtual environment and the
    interpreter that it was made from."""
    env: dict[str, str] = field(default_factory=dict, metadata={"needs": _PROCESS})
    """Variables of a command, with the same placeholders."""
    secrets: list[str] = field(default_factory=list, metadata={"needs": _PROCESS})
    """Names of variables of this process that a command gets, such as keys of other services."""
    verify: Any = field(default=None, metadata={"needs": _PROCESS})
    """A command that is run in the folder when the agent and all its processes have ended. What it
    writes is `verified` for reward functions; the last line is the number of `reward=verified`. If
    it fails, `agent.on_error` decides: nothing is written, and the number is 0, or the episode is
    lost."""
    tests: Optional[str] = setting(None, needs="agent.verify")  # noqa: UP045
    """A folder that `agent.verify` sees as `{tests}`, and the agent does not."""
    timeout_s: Optional[float] = setting(600.0, above=0, needs=_AGENT)  # noqa: UP045
    """Seconds of an episode, and again of its `verify`; null: no limit."""
    max_calls: int = setting(50, least=1, needs=_AGENT)
    """Calls of the model in an episode; later ones are refused."""
    max_tokens: Optional[int] = setting(None, least=1, needs=_AGENT)  # noqa: UP045
    """Sampled tokens of all calls of an episode; null: no limit."""
    context: Optional[int] = setting(None, least=2, needs=_AGENT)  # noqa: UP045
    """Tokens of a prompt and its answer: a longer prompt is refused, as servers do, so that the
    agent can shorten it. Null: `trainer.max_seq_len`; never more than the model has."""
    history: str = setting("template", choices=("template", "sampled"), needs=_AGENT)
    """`template`: the model reads the history that the chat template shows, as on servers.
    `sampled`: thoughts that the template would drop stay in it."""
    sampling: str = setting("run", choices=("run", "harness"), needs=_AGENT)
    """Whose temperature, top_p and other settings of sampling count: those of `rollout`, or those
    of the agent's requests."""
    train: str = setting("all", needs=_AGENT)
    """Which calls are trained: `all`, `main` (the path of the last call), or `module:function` from
    a call to bool."""
    untrained_models: list[str] = field(default_factory=list, metadata={"needs": _AGENT})
    """Patterns of model names, such as `*haiku*`: calls that ask for such a model are answered and
    not trained."""
    unsupported: str = setting("error", choices=("error", "ignore"), needs=_AGENT)
    """Answer formats that need constrained decoding: `error` refuses the call, `ignore` answers
    without."""
    on_timeout: str = setting("score", choices=("score", "lose"), needs=_AGENT)
    """An episode that reaches `timeout_s`. `score`: its answer is empty. `lose`: it has failed, and
    its group is left out."""
    on_error: str = setting("score", choices=("score", "lose"), needs=_AGENT)
    """The same for an agent that fails after a call of the model."""


def has_agent(section: AgentSection) -> bool:
    """Whether an agent plays the episodes."""
    return any(each is not None for each in (section.function, section.command, section.preset))


def build_agent(section: AgentSection, *, context: int | None, in_task: bool = False) -> AgentUse | None:
    """The agent with its limits; None without one. `context`: the tokens of a prompt and its
    answer, unless the section says. `in_task`: the task has sandboxes, in which agents work."""
    if not has_agent(section):
        return None
    if section.isolate == "fork" and in_task:
        raise ConfigError(
            "agent.isolate=fork has a sandbox of its own, and the task has one, too; use agent.command, or leave it out"
        )
    if in_task != (section.sandbox == "task") and section.sandbox != "auto":
        raise ConfigError(f"agent.sandbox ({section.sandbox}): `task` belongs to task.kind=harbor alone; leave it out")
    section = replace(section, sandbox="task") if in_task else section
    values = {item.name: getattr(section, item.name) for item in fields(AgentUse) if hasattr(section, item.name)}
    if ":" in section.train:
        values["train"] = import_named(section.train, "agent.train")
    if section.isolate == "fork":
        if ":" not in str(section.function):
            why = f"agent.isolate=fork imports it in another process, and only this one has {section.function}"
            raise ConfigError(f"{why}; move it into a module, and name module:function")
        names = {item.name for item in fields(AgentFork) if item.init} - {"argv", "output"}
        values["function"] = AgentFork([str(section.function)], **{name: getattr(section, name) for name in names})
    elif section.function is not None:
        values["function"] = find_agent(section.function)
    else:
        known = {"argv": section.command, "env": {}} if section.preset is None else PRESETS[section.preset]
        given = {item.name: getattr(section, item.name) for item in fields(AgentCommand) if item.name != "argv"}
        values["function"] = AgentCommand(**{**given, **known, "env": {**known["env"], **section.env}})
    if section.context is not None and context is not None and section.context > context:
        raise ConfigError(
            f"agent.context ({section.context}) is more than trainer.max_seq_len ({context}) trains; lower it, or raise that"
        )
    limits = Limits(section.max_calls, section.max_tokens, section.context or context)
    return AgentUse(**{**values, "limits": limits})
