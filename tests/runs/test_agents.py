"""Agents of the user's own in runs: the built-in errand, `GRPO(agent=)`, `ludic eval` and `ludic
rollout`, a resume, and settings that cannot be."""

import json
import sys
from pathlib import Path

import pytest
from playing import tiny_model
from typer.testing import CliRunner

from ludic import GRPO
from ludic.cli.app import app
from ludic.errors import ConfigError
from ludic.models.byte_tokenizer import make_line_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
ROWS = [{"prompt": "how many?", "answer": "7"}, {"prompt": "and now?", "answer": "7"}]
SMALL = {
    "threads": 1,
    "steps": 2,
    "rollout": {"prompts": 1, "group_size": 2, "max_new_tokens": 8, "log_every": 1},
    "evaluation": {"prompts": 1, "samples_per_prompt": 1},
}
AGENT = """
async def ask(session):
    client = session.client()
    answer = await client.chat.completions.create(model="x", messages=session.messages, temperature=0.0)
    return answer.choices[0].message.content


def exact(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer)]
"""
ASK = """
import json, os, sys, urllib.request
body = json.dumps({"model": "x", "messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(asked, timeout=20))["choices"][0]["message"]["content"])
"""
ERRAND = [
    *("errand", "threads=1", "warmup.steps=3", "rollout.prompts=2", "rollout.group_size=4", "rollout.max_new_tokens=20"),
    *("evaluation.prompts=4", "rollout.log_every=1", "trainer.overhead_tokens=0"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bot.py").write_text(AGENT)
    tokenizer = make_line_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("policy")
    tiny_model(eos_token_id=tokenizer.eos_token_id, max_position_embeddings=256).save_pretrained("policy")


def read_lines(path: Path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_the_errand_is_played_by_its_agent_and_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    run("train", *ERRAND, "steps=2", "name=one")
    folder = Path("runs/one")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished"
    rollouts = read_lines(folder / "rollouts.jsonl")
    assert len(rollouts) == 16
    for rollout in rollouts:
        assert rollout["meta"]["agent"]["calls"] == len(rollout["steps"])
        for step in rollout["steps"]:
            assert step["trace"]["completion_logprobs"]
    metrics = read_lines(folder / "metrics.jsonl")
    assert metrics[-1]["train/agent/calls"] >= 1
    run("train", "--resume", str(folder), "steps=3")
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    assert len(read_lines(folder / "rollouts.jsonl")) == 24
    run("eval", str(folder), "evaluation.prompts=2", "name=measured")
    assert "agent/calls" in Path("runs/measured/summary.json").read_text()
    run("rollout", str(folder), "--episodes", "4", "--out", "played.jsonl")
    assert all("agent" in rollout["meta"] for rollout in read_lines(Path("played.jsonl")))


def test_an_agent_of_a_script_is_trained_on_rows(capsys: pytest.CaptureFixture[str]) -> None:
    async def own(session):
        client = session.client()
        messages = list(session.messages)
        for _ in range(2):
            answer = (await client.chat.completions.create(model="x", messages=messages)).choices[0].message.content
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": session.row["answer"]}]
        return "7"

    def exact(completions, answer, **columns):
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    made = {"name": "own", **SMALL}
    summary = GRPO("policy", exact, ROWS, agent={"function": own, "max_calls": 4}, **made).train()
    assert (summary["status"], summary["after"]["sampled_reward"]) == ("finished", 1.0)
    rollouts = read_lines(Path("runs/own/rollouts.jsonl"))
    assert {len(rollout["steps"]) for rollout in rollouts} == {2}
    assert {rollout["steps"][1]["info"]["parent"] for rollout in rollouts} == {0}
    assert "Agent: 2 calls" in capsys.readouterr().out


def test_an_agent_is_named_by_module_and_its_ignored_settings_are_told() -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    given = ["data=rows.jsonl", "reward=bot:exact", "agent=bot:ask", "model=policy"]
    small = [
        "threads=1",
        "steps=1",
        "rollout.prompts=1",
        "rollout.group_size=2",
        "rollout.max_new_tokens=8",
        "evaluation.prompts=1",
    ]
    output = run("train", *given, *small, "name=named")
    assert "ignored: temperature=0.0" in output
    Path("own").mkdir()
    Path("own/ask.py").write_text(ASK)
    command = f"agent=['{sys.executable}',ask.py,'{{prompt}}']"
    output = run("train", *given[:2], "model=policy", command, "agent.files=own", "agent.sandbox=none", *small, "name=command")
    assert "Agent: 1 call in" in output
    verify = ["reward=verified", f"agent.verify=['{sys.executable}',-c,'print(7)']"]
    run("train", given[0], *verify, "model=policy", command, "agent.files=own", "agent.sandbox=none", *small, "name=verified")
    assert {rollout["total_reward"] for rollout in read_lines(Path("runs/verified/rollouts.jsonl"))} == {7.0}
    tried = run("agent", "try", *given, "--json")
    made = json.loads(tried[tried.index("{") :])
    assert made["calls"][0]["reason"] == "root"
    assert made["agent"]["reward"] in (0.0, 1.0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"agent": "bot:nothing"}, "has no 'nothing'"),
        ({"agent": "bot:ask", "reward": "verified"}, r"set agent\.verify"),
        ({"agent": 3}, r"agent.command \(3\) must be a list"),
        ({"agent": "bot:ask", "tools": "bot:ask"}, "agent.function"),
        ({"agent": {"function": "bot:ask", "history": "all"}}, "agent.history"),
        ({"agent": {"max_calls": 3}}, "agent.max_calls"),
        ({"agent": {"preset": "nothing"}}, r"agent.preset \(nothing\)"),
        ({"agent": {"preset": "mini-swe-agent", "function": "bot:ask"}}, r"agent.preset .*agent.function"),
        ({"agent": {"preset": "mini-swe-agent", "sandbox": "none"}}, r"agent.command \(mini\) is no program"),
        ({"agent": {"function": "bot:ask", "context": 5000}}, r"agent.context \(5000\) .*trainer.max_seq_len"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict, said: str) -> None:
    reward = settings.pop("reward", lambda completions, **columns: [0.0 for _ in completions])
    with pytest.raises((ConfigError, TypeError), match=said):
        GRPO("policy", reward, ROWS, name="none", **{**SMALL, **settings}).train()


def test_an_agent_needs_a_task_of_one_turn() -> None:
    result = CliRunner().invoke(app, ["train", "tictactoe", "agent=bot:ask"])
    assert result.exit_code == 2
    assert "needs a task of one turn" in result.output


def test_an_agent_that_fails_ends_the_run_before_the_first_step() -> None:
    async def broken(session):
        raise OSError("no such program")

    made = {"name": "broken", **SMALL}
    with pytest.raises(Exception, match="no such program"):
        GRPO("policy", lambda completions, **columns: [0.0 for _ in completions], ROWS, agent=broken, **made).train()
