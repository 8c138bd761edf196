"""Shared parts of evaluation scripts: flags, an engine, an inference specification."""

import argparse
import json
import signal

import fake_vllm
import httpx2
import pytest
from playing import Counting, ScriptedClient, play
from processes import wait_for_end

from ludic.context import TruncatedThinkingContext
from ludic.errors import InferenceError
from ludic.eval import add_common_eval_args, build_single_agent_engine, inference_spec_from_cli, maybe_start_vllm, run_eval
from ludic.inference.servers.ports import free_port
from ludic.inference.vllm import launch
from ludic.parsers import ParseResult
from ludic.training import EnvSpec, ProtocolSpec, RolloutRequest


def arguments(*given):
    parser = argparse.ArgumentParser()
    add_common_eval_args(parser)
    return parser.parse_args(given)


def test_the_flags_have_the_documented_defaults():
    assert vars(arguments()) == {
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "host": "127.0.0.1",
        "port": 8000,
        "start_server": False,
        "temperature": 0.0,
        "max_tokens": 512,
        "timeout_s": None,
        "concurrency": 64,
        "max_steps": 1,
        "out": None,
        "gpu_memory_utilization": 0.7,
        "max_model_len": None,
    }
    given = arguments("--timeout-s", "2", "--max-model-len", "99", "--out", "x.jsonl", "--start-server")
    assert (given.timeout_s, given.max_model_len, given.out, given.start_server) == (2.0, 99, "x.jsonl", True)


def test_sampling_follows_the_flags_and_returns_tokens():
    spec = inference_spec_from_cli(arguments("--temperature", "0.5", "--max-tokens", "7"))
    assert (spec.sampling.temperature, spec.sampling.max_tokens) == (0.5, 7)
    assert (spec.return_.return_token_ids, spec.return_.return_chosen_logprobs) == (True, False)


@pytest.fixture
def servers(tmp_path, monkeypatch):
    """Servers started during the test are fakes. Yields their processes."""
    started = []
    start = launch.start_vllm_server
    monkeypatch.setattr(launch, "start_vllm_server", lambda *given, **more: started.append(start(*given, **more)) or started[-1])
    monkeypatch.setenv("LUDIC_VLLM_PYTHON", fake_vllm.install(tmp_path / "venv"))
    monkeypatch.setenv("FAKE_VLLM_FACTS", str(tmp_path / "facts.json"))
    yield started
    for proc in started:
        launch.stop_vllm_server(proc, 0.1)


def test_no_server_is_started_without_the_flag(servers):
    with maybe_start_vllm(arguments()):
        assert servers == []
    with maybe_start_vllm(argparse.Namespace()):
        assert servers == []


def test_a_started_server_is_ready_inside_the_block_and_interrupted_after_it(servers, tmp_path):
    port = free_port()
    flags = arguments("--start-server", "--model", "org/model", "--port", str(port), "--max-model-len", "99")
    with maybe_start_vllm(flags):
        assert httpx2.get(f"http://127.0.0.1:{port}/health", timeout=30).status_code == 200
        (proc,) = servers
        assert proc.poll() is None
    assert proc.returncode == -signal.SIGINT
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert wait_for_end(facts["child"])
    server_arguments = facts["arguments"]
    assert server_arguments[server_arguments.index("--model") + 1] == "org/model"
    assert server_arguments[server_arguments.index("--max-model-len") + 1] == "99"


def test_the_server_is_stopped_when_the_block_raises(servers):
    with pytest.raises(KeyError, match="mine"), maybe_start_vllm(arguments("--start-server", "--port", str(free_port()))):
        raise KeyError("mine")
    assert servers[0].returncode == -signal.SIGINT


def test_a_server_that_does_not_start_is_an_error_and_the_block_does_not_run(servers, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "exit")
    flags = arguments("--start-server", "--port", str(free_port()))
    with pytest.raises(InferenceError, match="ended with status 3"), maybe_start_vllm(flags):
        pytest.fail("the body must not run")


def picky(text):
    return ParseResult(text, 0.0, None) if text == "good" else ParseResult(None, -1.0, "say good")


def run(client, **settings):
    engine = build_single_agent_engine(client=client, model="m", parser=picky, env_registry={"count": Counting}, **settings)
    flags = [RolloutRequest(EnvSpec("count", {"goal": 2}), ProtocolSpec("single_agent")) for _ in range(2)]
    return play(run_eval(engine=engine, requests=flags, reducers={}, max_steps=3, concurrency=1))[0]


def test_the_engine_uses_one_agent_and_a_new_context_for_each_episode():
    client = ScriptedClient("good")
    records = run(client, system_prompt="Be good.")
    assert [record["reward"] for record in records] == [0.0, 1.0, 0.0, 1.0]
    assert [len(request.messages) for request in client.requests] == [2, 4, 2, 4]
    assert client.requests[0].messages[0] == {"role": "system", "content": "Be good."}
    assert client.requests[0].model == "m"


def test_an_unparsable_answer_can_end_the_episode():
    assert [r["reward"] for r in run(ScriptedClient("bad"), stop_on_parse_error=True)] == [-1.0, -1.0]
    assert len(run(ScriptedClient("bad"))) == 6


@pytest.mark.parametrize(
    "factory",
    [
        TruncatedThinkingContext,
        lambda system_prompt: TruncatedThinkingContext(system_prompt),
        lambda: TruncatedThinkingContext("Be good."),
    ],
)
def test_the_context_class_can_be_set(factory):
    client = ScriptedClient("<think>long</think> good")
    run(client, system_prompt="Be good.", context_factory=factory)
    second = client.requests[1].messages
    assert second[0]["content"] == "Be good."
    assert "[TRUNCATED]" in second[2]["content"]
