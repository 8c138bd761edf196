"""What evaluation scripts share: flags, an engine, an inference specification."""

import argparse
import json
import signal

import fake_vllm
import httpx2
import pytest
from playing import Counting, ScriptedClient, play
from processes import until_gone

from ludic.context import TruncatedThinkingContext
from ludic.errors import InferenceError
from ludic.eval import add_common_eval_args, build_single_agent_engine, inference_spec_from_cli, maybe_start_vllm, run_eval
from ludic.inference.vllm import launch
from ludic.parsers import ParseResult
from ludic.training import EnvSpec, ProtocolSpec, RolloutRequest


def arguments(*given):
    parser = argparse.ArgumentParser()
    add_common_eval_args(parser)
    return parser.parse_args(given)


def test_the_flags_have_the_defaults_of_the_interface():
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


def test_sampling_is_as_the_flags_say_and_tokens_come_back():
    spec = inference_spec_from_cli(arguments("--temperature", "0.5", "--max-tokens", "7"))
    assert (spec.sampling.temperature, spec.sampling.max_tokens) == (0.5, 7)
    assert (spec.return_.return_token_ids, spec.return_.return_chosen_logprobs) == (True, False)


@pytest.fixture
def servers(tmp_path, monkeypatch):
    """Servers started from here on are fakes; those that were."""
    started = []
    start = launch.start_vllm_server
    monkeypatch.setattr(launch, "start_vllm_server", lambda *given, **more: started.append(start(*given, **more)) or started[-1])
    monkeypatch.setenv("LUDIC_VLLM_PYTHON", fake_vllm.install(tmp_path / "venv"))
    monkeypatch.setenv("FAKE_VLLM_FACTS", str(tmp_path / "facts.json"))
    yield started
    for proc in started:
        launch.stop_vllm_server(proc, 0.1)


def test_no_server_is_started_unless_asked(servers):
    with maybe_start_vllm(arguments()):
        assert servers == []
    with maybe_start_vllm(argparse.Namespace()):
        assert servers == []


def test_a_server_that_was_asked_for_is_ready_within_and_interrupted_after(servers, tmp_path):
    port = launch.free_port()
    asked = arguments("--start-server", "--model", "org/model", "--port", str(port), "--max-model-len", "99")
    with maybe_start_vllm(asked):
        assert httpx2.get(f"http://127.0.0.1:{port}/health", timeout=30).status_code == 200
        (proc,) = servers
        assert proc.poll() is None
    assert proc.returncode == -signal.SIGINT
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert until_gone(facts["child"])
    given = facts["arguments"]
    assert given[given.index("--model") + 1] == "org/model"
    assert given[given.index("--max-model-len") + 1] == "99"


def test_it_is_stopped_when_what_runs_within_fails(servers):
    with pytest.raises(KeyError, match="mine"), maybe_start_vllm(arguments("--start-server", "--port", str(launch.free_port()))):
        raise KeyError("mine")
    assert servers[0].returncode == -signal.SIGINT


def test_one_that_does_not_come_up_is_an_error_and_nothing_runs_within(servers, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "exit")
    asked = arguments("--start-server", "--port", str(launch.free_port()))
    with pytest.raises(InferenceError, match="ended with status 3"), maybe_start_vllm(asked):
        pytest.fail("the body must not run")


def picky(text):
    return ParseResult(text, 0.0, None) if text == "good" else ParseResult(None, -1.0, "say good")


def run(client, **settings):
    engine = build_single_agent_engine(client=client, model="m", parser=picky, env_registry={"count": Counting}, **settings)
    asked = [RolloutRequest(EnvSpec("count", {"goal": 2}), ProtocolSpec("single_agent")) for _ in range(2)]
    return play(run_eval(engine=engine, requests=asked, reducers={}, max_steps=3, concurrency=1))[0]


def test_the_engine_plays_with_one_agent_and_a_context_of_its_own_for_each_episode():
    client = ScriptedClient("good")
    records = run(client, system_prompt="Be good.")
    assert [record["reward"] for record in records] == [0.0, 1.0, 0.0, 1.0]
    assert [len(request.messages) for request in client.requests] == [2, 4, 2, 4]
    assert client.requests[0].messages[0] == {"role": "system", "content": "Be good."}
    assert client.requests[0].model == "m"


def test_an_answer_that_cannot_be_parsed_may_end_the_episode():
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
def test_the_context_can_be_another(factory):
    client = ScriptedClient("<think>long</think> good")
    run(client, system_prompt="Be good.", context_factory=factory)
    second = client.requests[1].messages
    assert second[0]["content"] == "Be good."
    assert "[TRUNCATED]" in second[2]["content"]
