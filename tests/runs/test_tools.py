"""Functions that the model may call before it answers: in training, in both measurements, after a
resume, and in `ludic eval`. The model is a small one that knows one call of `stock` by heart."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ludic import GRPO, SFT
from ludic.agents.tool_agent import find_tools
from ludic.agents.tool_schema import tool_schema
from ludic.cli.app import app
from ludic.errors import ConfigError

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name }};{% endfor -%}
{%- for m in messages %}{{ m.role[0] }}:{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>
{{- {"name": c.function.name, "arguments": c.function.arguments} | tojson }}</tool_call>
{%- endfor %}{{ '\\n' }}{% endfor -%}
{%- if add_generation_prompt %}a:{% endif -%}"""
SHOP = '''
def stock(item: str) -> str:
    """How many of an item are in stock."""
    return "7"


def exact(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer)]
'''
ROWS = [{"prompt": "how many?", "answer": "7"}, {"prompt": "and now?", "answer": "7"}]
SMALL = {
    "threads": 1,
    "steps": 2,
    "trainer": {"lr": 1e-9},
    "rollout": {"prompts": 1, "group_size": 2, "max_new_tokens": 80, "temperature": 0.1, "log_every": 1},
    "evaluation": {"prompts": 1, "samples_per_prompt": 1},
}
CALL = {"name": "stock", "arguments": {"item": "a"}}


def stock(item: str) -> str:
    """How many of an item are in stock."""
    return "7"


CALLS = [
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "7"},
]


def learn_by_heart(folder: Path, messages: list[dict]) -> Path:
    rows = [{"messages": [{"role": "user", "content": row["prompt"]}, *messages], "tools": [tool_schema(stock)]} for row in ROWS]
    (folder / "tools.jinja").write_text(TEMPLATE)
    sft = SFT(
        None,
        rows * 4,
        chat_template=str(folder / "tools.jinja"),
        network={"end_of_turn": "newline", "hidden_size": 64, "num_layers": 1, "intermediate_size": 128, "max_positions": 512},
        output=str(folder),
        name="start",
        steps=150,
        batch_size=4,
        threads=1,
        heldout=0,
        trainer={"lr": 1e-2},
    )
    sft.train()
    return folder / "start" / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learn_by_heart(tmp_path_factory.mktemp("calls"), CALLS)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def lines(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_every_call_is_a_sample_and_rewards_get_the_answer(model: Path) -> None:
    """One call and one answer an episode, so 2 episodes of a group are 4 samples."""
    asked, seen = [], []

    def stock(item: str) -> str:
        """How many of an item are in stock."""
        asked.append(item)
        return "7"

    def exact(completions, completion_ids, answer, **columns):
        seen.extend(zip(completions, map(len, completion_ids), strict=True))
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    grpo = GRPO(model, exact, ROWS, tools=[stock], name="mine", **SMALL)
    summary = grpo.train()
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    assert set(asked) == {"a"}
    assert set(seen) == {("7", 2)}  # the digit and the end of the turn; the call is no part of it
    assert len(asked) == len(seen) == 2 * 2 + 2 * 2  # two steps of two episodes, and sampled and greedy, before and after
    for metrics in lines("runs/mine/metrics.jsonl"):
        assert metrics["train/num_samples"] == 4
        assert (metrics["train/tools/calls"], metrics["train/tools/failed"]) == (1, 0)
    for rollout in lines("runs/mine/rollouts.jsonl"):
        call, answer = rollout["steps"]
        assert (call["info"]["intermediate_call"], call["reward"], answer["reward"]) == (True, 0, 1)
        before, after = call["trace"], answer["trace"]
        begun = [*before["prompt_token_ids"], *before["completion_token_ids"]]
        assert after["prompt_token_ids"][: len(begun)] == begun
    assert yaml.safe_load(Path("runs/mine/config.yaml").read_text())["tools"] == ["stock"]
    evaluation = json.loads(Path("runs/mine/progress.json").read_text())["after"]
    assert (evaluation["facts"]["tools/calls"], evaluation["sampled_reward"]) == (1, 1)
    assert (evaluation["answers"][0]["text"], evaluation["answers"][0]["calls"]) == ("7", 'stock(item="a") -> 7')
    from ludic.runs.view.episodes import EpisodeTable

    table = EpisodeTable(10)
    table.add(0, Path("runs/mine/rollouts.jsonl"), None)
    assert [[turn[-1][0] for turn in row[6]] for row in table.rows] == [['calls stock(item="a") -> 7', "right answer 7"]] * 4


@pytest.mark.parametrize("per_episode", [False, True])
def test_the_tools_of_a_server_are_called_like_functions(per_episode: bool, model: Path) -> None:
    pytest.importorskip("mcp")
    Path("pids").mkdir()
    program = Path(__file__).parents[1] / "support" / "mcp_server.py"
    tools = [f"mcp:{sys.executable} {program} one-tool {Path('pids').resolve()}"]
    own = {"tools": tools, "mcp": {"per_episode": per_episode}, "name": "served", **SMALL}
    GRPO(model, lambda completions, **_: [float(text == "7") for text in completions], ROWS, **own).train()
    for metrics in lines("runs/served/metrics.jsonl"):
        assert (metrics["train/tools/calls"], metrics["train/tools/failed"]) == (1, 0)
    assert {rollout["steps"][-1]["action"] for rollout in lines("runs/served/rollouts.jsonl")} == {"7"}
    assert yaml.safe_load(Path("runs/served/config.yaml").read_text())["tools"] == tools
    processes = list(Path("pids").iterdir())
    assert len(processes) == (1 + 2 * 2 + 2 * 2 if per_episode else 1)  # the one that lists, and of each episode
    assert not [each for each in processes if Path(f"/proc/{each.name}").exists()]


def test_an_async_tool_is_awaited(model: Path) -> None:
    async def stock(item: str) -> str:
        """How many of an item are in stock."""
        await asyncio.sleep(0.001)
        return "7"

    GRPO(model, lambda completions, **_: [0.0] * len(completions), ROWS, tools=stock, name="awaits", **SMALL).train()
    for rollout in lines("runs/awaits/rollouts.jsonl"):
        assert rollout["steps"][0]["info"]["tool_results"] == ["7"]


@pytest.mark.parametrize("malformed", ["error", "answer"])
def test_broken_json_between_the_tags_is_a_failed_call_unless_it_shall_be_an_answer(
    malformed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = '<tool_call>{"name": "stock", }'
    model = learn_by_heart(tmp_path, [{"role": "assistant", "content": broken}])
    seen = []

    def watch(completions, tool_calls, **columns):
        seen.extend(tool_calls)
        return [0.0] * len(completions)

    rollout = {**SMALL["rollout"], "max_tool_turns": 2, "malformed_tool_calls": malformed}
    GRPO(model, watch, ROWS, tools=stock, name="broken", **{**SMALL, "rollout": rollout}).train()
    first = lines("runs/broken/rollouts.jsonl")[0]["steps"]
    if malformed == "answer":
        assert (len(first), first[0]["action"]) == (1, broken)
        return
    fault = "Expecting property name enclosed in double quotes: line 1 column 30 (char 29)"
    told = f"Error: the call cannot be read: {fault}. Write it again."
    assert (first[0]["action"], first[0]["next_obs"]) == (broken, told)
    begun = [*first[0]["trace"]["prompt_token_ids"], *first[0]["trace"]["completion_token_ids"]]
    assert first[1]["trace"]["prompt_token_ids"][: len(begun)] == begun
    assert {(each["arguments"], each["result"], each["failed"]) for calls in seen for each in calls} == {(broken, told, True)}
    assert [line["train/tools/failed"] for line in lines("runs/broken/metrics.jsonl")] == [1, 1]
    assert "Tool (a call that cannot be read) failed in 100% of 4 logged calls" in " ".join(capsys.readouterr().out.split())


def test_a_tool_that_raises_is_told_to_the_model_and_counted(
    model: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def stock(item: str) -> str:
        """How many of an item are in stock."""
        raise LookupError(f"no shelf for {item}")

    GRPO(model, lambda completions, **_: [0.0] * len(completions), ROWS, tools=stock, name="fails", **SMALL).train()
    for metrics in lines("runs/fails/metrics.jsonl"):
        assert (metrics["train/tools/calls"], metrics["train/tools/failed"]) == (1, 1)
    told = {rollout["steps"][0]["next_obs"] for rollout in lines("runs/fails/rollouts.jsonl")}
    assert told == {"Error executing tool stock: LookupError: no shelf for a"}
    assert "no shelf" not in caplog.text
    said = (
        "Tool stock failed in 100% of 4 logged calls, most often with 'Error executing tool stock: LookupError: no shelf for a'"
    )
    assert said in " ".join(capsys.readouterr().out.split())


def test_the_command_trains_resumes_and_evaluates_with_tools(model: Path) -> None:
    Path("shop_tools.py").write_text(SHOP)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = ["threads=1", "trainer.lr=1e-9", "trainer.lr_scheduler_type=constant_with_warmup", "evaluation.prompts=1"]
    settings += ["rollout.prompts=1", "rollout.group_size=2", "rollout.max_new_tokens=80", "rollout.temperature=0.1"]
    named = ["reward=shop_tools:exact", "tools=[shop_tools:stock]", "name=command"]
    invoke = CliRunner().invoke
    begun = invoke(app, ["train", f"model={model}", "data=rows.jsonl", *named, "steps=1", *settings])
    assert begun.exit_code == 0, begun.output
    resumed = invoke(app, ["train", "--resume", "runs/command", "steps=2"])
    assert resumed.exit_code == 0, resumed.output
    assert [line["train/tools/calls"] for line in lines("runs/command/metrics.jsonl")] == [1, 1]
    measured = invoke(app, ["eval", "runs/command", "k=2", "name=measured"])
    assert measured.exit_code == 0, measured.output
    summary = json.loads(Path("runs/measured/summary.json").read_text())
    assert "tools/calls" in json.dumps(summary)
    [line] = lines("runs/measured/problems.jsonl")
    assert (line["texts"], line["calls"]) == (["7"] * 2, ['stock(item="a") -> 7'] * 2)


def test_a_function_without_a_module_is_asked_for_by_a_resume(model: Path) -> None:
    def stock(item: str) -> str:
        """How many of an item are in stock."""
        return "7"

    settings = {**SMALL, "trainer": {"lr": 1e-9, "lr_scheduler_type": "constant_with_warmup"}}
    run = {"tools": [stock], "name": "here", **settings}
    GRPO(model, "pure_accuracy_math", ROWS, **{**run, "steps": 1}).train()
    result = CliRunner().invoke(app, ["train", "--resume", "runs/here", "steps=2"])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "tools (stock) is not known; if it is a function of a script, put it into a file" in said
    assert "give tools=[my_tools:stock]; the script itself can go on with train(resume=True)" in said
    result = CliRunner().invoke(app, ["eval", "runs/here"])
    assert (result.exit_code, "give tools=[my_tools:stock]" in " ".join(result.output.split())) == (2, True)
    Path("their_tools.py").write_text(SHOP)
    result = CliRunner().invoke(app, ["eval", "runs/here", "tools=[their_tools:stock]", "problems=1", "name=measured"])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(Path("runs/measured/config.yaml").read_text())["tools"] == ["their_tools:stock"]
    assert GRPO(model, "pure_accuracy_math", ROWS, **run).train(resume=True)["steps"] == 2
    with pytest.raises(ConfigError, match="actors cannot import the tool 'stock'"):
        GRPO(model, "pure_accuracy_math", ROWS, place={"actors": 1}, **run)


def untold(item):
    return item


def unhinted(item, number: int = 1):
    """Of which a model knows one parameter."""


def listed(*items: str):
    """Takes any number of items."""


def test_a_dotted_name_is_answered_with_the_name_to_write() -> None:
    with pytest.raises(ConfigError, match=r"tools \(shop\.stock\.count\) is not known; write shop\.stock:count"):
        find_tools(["shop.stock.count"])


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([listed], r"the tool listed takes \*arguments, .* take a list"),
        ([untold], "the tool untold has no docstring, .* write one"),
        ([unhinted], "the tool unhinted has no type hint for item; write one, such as item: str"),
        ([len], "has positional-only parameters"),
        ([lambda item: item], "has no docstring"),
        ([3], "cannot be a tool"),
        ([stock, stock], "two tools have the name"),
    ],
)
def test_what_a_model_cannot_be_told_of_is_refused(tools, said, model: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        GRPO(model, "pure_accuracy_math", ROWS, tools=tools, name="none").train()
    assert not Path("runs/none").exists()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "ignores tools"),
        ("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", "leaves out the calls of tools"),
        (
            TEMPLATE.replace("{{ m.role[0] }}:{{ m.content or '' }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}"),
            "results",
        ),
        (TEMPLATE.replace("<tool_call>", "[CALL]").replace("</tool_call>", ""), "in none of the formats"),
        ("{{ tools }}{{ raise_exception('no tools here') }}", "cannot write a call of a tool"),
    ],
)
def test_a_template_that_cannot_show_tools_is_an_error_before_the_run(template, said, model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained("other")
    with pytest.raises(ConfigError, match=rf"shown its tools \(stock\).*{said}.*chat_template=FILE"):
        GRPO(model, "pure_accuracy_math", ROWS, tools=stock, tokenizer="other", name="none", **SMALL).train()
    assert not Path("runs/none").exists()
