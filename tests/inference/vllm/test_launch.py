"""Server processes: how they start, when they are ready, what errors show, and that nothing is left
behind."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import fake_vllm
import httpx2
import pytest
from processes import is_running, wait_for_end
from stub_vllm import StubVLLM

import ludic
from ludic.errors import ConfigError, EngineDeadError
from ludic.inference.servers.ports import free_port
from ludic.inference.vllm import launch
from ludic.inference.vllm.endpoints import VllmEndpoints
from ludic.inference.vllm.in_server.secret import secret_file
from ludic.inference.vllm.launch import (
    collect_proc_output,
    package_root,
    server_python,
    server_variables,
    start_vllm_server,
    stop_vllm_server,
    wait_for_vllm_health,
)


@pytest.fixture
def start(tmp_path):
    """Starts the fake server. Returns (process, port, function that reads its command line and
    environment)."""
    running = []
    python = fake_vllm.install(tmp_path / "venv")

    def begin(mode="ok", **settings):
        facts, port = tmp_path / f"facts-{len(running)}.json", free_port()
        env = {"FAKE_VLLM": mode, "FAKE_VLLM_FACTS": str(facts), **settings.pop("env", {})}
        settings = {"model": "tiny", "python": python, "stream_output": False, **settings}
        proc = start_vllm_server(host="127.0.0.1", port=port, env=env, **settings)
        running.append(proc)

        def read():
            while not facts.exists() or not facts.read_text():
                assert proc.poll() is None
                time.sleep(0.01)
            return json.loads(facts.read_text())

        return proc, port, read

    yield begin
    for proc in running:
        stop_vllm_server(proc, timeout_s=0.1)


def test_a_server_is_ready_after_its_first_sample_and_stops_completely(start):
    proc, port, facts = start()
    wait_for_vllm_health("127.0.0.1", port, proc, timeout_s=60)
    child = facts()["child"]
    assert is_running(child)
    stop_vllm_server(proc)
    assert proc.returncode is not None
    assert wait_for_end(child)


def test_a_server_that_ignores_sigterm_is_killed(start):
    proc, _, facts = start("stubborn")
    child = facts()["child"]
    assert stop_vllm_server(proc, timeout_s=0.2) == -signal.SIGKILL
    assert wait_for_end(child)


def test_a_server_that_exits_is_an_error_with_its_output(start):
    proc, port, _ = start("exit")
    with pytest.raises(RuntimeError, match=r"(?s)ended with status 3.*no such model"):
        wait_for_vllm_health("127.0.0.1", port, proc, timeout_s=60)


def test_a_server_that_exits_is_an_error_with_the_output_in_its_log_file(start, tmp_path):
    log = tmp_path / "server.log"
    proc, port, _ = start("exit", log_path=log)
    with pytest.raises(RuntimeError, match=r"(?s)server\.log\):.*no such model"):
        wait_for_vllm_health("127.0.0.1", port, proc, timeout_s=60)
    assert "no such model" in log.read_text()


def test_a_server_that_is_not_ready_in_time_is_stopped(start):
    proc, port, facts = start("deaf")
    child = facts()["child"]
    with pytest.raises(RuntimeError, match=r"not ready within 0\.2 s"):
        wait_for_vllm_health("127.0.0.1", port, proc, timeout_s=0.2)
    assert proc.poll() is not None
    assert wait_for_end(child)


def test_a_healthy_server_that_cannot_sample_is_not_ready(start):
    """With an unsupported head size, an engine is healthy until the first request kills it."""
    proc, port, _ = start("sick")
    with pytest.raises(EngineDeadError, match="healthy and cannot sample"):
        wait_for_vllm_health("127.0.0.1", port, proc, timeout_s=60)
    assert proc.poll() is not None


def test_a_server_without_models_is_ready_when_it_is_healthy(start):
    proc, _, _ = start("deaf")
    with StubVLLM() as stub:
        stub.fail("/v1/models", (404, {"detail": "Not Found"}))
        wait_for_vllm_health("127.0.0.1", stub.port, proc, timeout_s=5)
    assert proc.poll() is None


def test_output_is_read_continuously_so_that_no_pipe_fills(start):
    """A server prints more than a pipe buffer holds before it listens."""
    proc, port, _ = start()
    wait_for_vllm_health("127.0.0.1", port, proc, timeout_s=60)
    out, err = collect_proc_output(proc, timeout=0)
    assert (len(out), err) == (200_001, "")
    stop_vllm_server(proc)
    assert len(collect_proc_output(proc)[0]) == 200_001


def test_the_output_of_any_other_process_is_collected_too():
    proc = subprocess.Popen([sys.executable, "-c", "print('a')"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert collect_proc_output(proc, timeout=30) == ("a\n", "")
    silent = subprocess.Popen([sys.executable, "-c", "pass"])
    assert collect_proc_output(silent) == ("", "")


def after(arguments, flag):
    return arguments[arguments.index(flag) + 1]


def test_on_a_cpu_the_flags_are_those_that_a_cpu_supports(start):
    _, port, facts = start(max_model_len=128, client_tags=True, weights="disk", served_model_name="policy")
    arguments, env = facts()["arguments"], facts()["environment"]
    assert arguments[:4] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "tiny"]
    expected = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--served-model-name": "policy",
        "--max-model-len": "128",
        "--dtype": "float32",
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--kv-cache-memory-bytes": str(2**30),  # there is no config of `tiny`
        "--worker-extension-cls": "ludic.inference.vllm.in_server.worker.WeightWorker",
        "--weight-transfer-config": '{"backend": "disk"}',
        "--middleware": "ludic.inference.vllm.in_server.client_tag_middleware.ClientTagMiddleware",
    }
    assert {flag: after(arguments, flag) for flag in expected} == expected
    assert after(arguments[arguments.index("--middleware") + 1 :], "--middleware").endswith(".SecretMiddleware")
    assert {"--enforce-eager", "--enable-scale-out"} <= set(arguments)
    assert "--gpu-memory-utilization" not in arguments
    assert (env["VLLM_SERVER_DEV_MODE"], env["VLLM_USE_V1"], env["VLLM_ENABLE_V1_MULTIPROCESSING"]) == ("1", "1", "0")
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in env


CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("config", "limit", "tokens"),
    [
        ({**CONFIG, "max_position_embeddings": 100_000}, None, 100_000),  # one request of the whole context
        ({**CONFIG, "max_position_embeddings": 100_000}, 50_000, 50_000),
        ({**CONFIG, "max_position_embeddings": 128}, None, 64 * 512),
        ({"text_config": {**CONFIG, "max_position_embeddings": 128}, "model_type": "of images too"}, None, 64 * 512),
    ],
)
def test_on_a_cpu_the_cache_has_room_for_the_model(start, tmp_path, config, limit, tokens):
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = start(model=str(tmp_path), max_model_len=limit)[2]()["arguments"]
    # 3 layers, keys and values, 2 heads of 8 values of 4 bytes: 384 bytes a token, and 5 % more
    assert int(after(arguments, "--kv-cache-memory-bytes")) == int(3 * 2 * 2 * 8 * 4 * 1.05 * tokens)


def test_the_first_error_of_the_engine_is_named(tmp_path):
    log = tmp_path / "server.log"
    lines = ["WARNING limits can cause `OSError: [Errno 24] Too many open files`", "Traceback (most recent call last):"]
    lines += ["(EngineCore pid=7) ERROR 11-28 10:17:05 [core.py:1510] ValueError: 0.35 GiB KV cache is needed"]
    lines += [f"  line {n}" for n in range(80)] + ["RuntimeError: Engine core initialization failed. See root cause above."]
    log.write_text("\n".join(lines))
    proc = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    proc.wait()
    launch._LOGS[proc] = log
    with pytest.raises(RuntimeError, match=r"ValueError: 0\.35 GiB KV cache .*end of its output"):
        wait_for_vllm_health("127.0.0.1", free_port(), proc, timeout_s=60)


@pytest.mark.parametrize(
    ("settings", "development", "adapters"),
    [
        ({}, None, None),
        ({"weights": "gloo"}, "1", None),
        ({"extra_args": ["--weight-transfer-config={}"]}, "1", None),
        ({"extra_args": ["--enable-lora"]}, "1", "1"),
    ],
)
def test_control_endpoints_are_enabled_only_if_needed(start, monkeypatch, settings, development, adapters):
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", raising=False)
    env = start(**settings)[2]()["environment"]
    assert env.get("VLLM_SERVER_DEV_MODE") == development
    assert env.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == adapters


def test_the_secret_of_a_server_is_not_on_the_command_line_and_is_removed_with_it(start):
    proc, port, facts = start(weights="gloo")
    arguments, secret = facts()["arguments"], facts()["environment"]["LUDIC_SERVER_SECRET"]
    assert after(arguments, "--middleware") == "ludic.inference.vllm.in_server.secret_middleware.SecretMiddleware"
    assert not any(secret in argument for argument in arguments)
    assert "LUDIC_SERVER_SECRET" not in os.environ
    wait_for_vllm_health("127.0.0.1", port, proc, timeout_s=60)
    url = f"http://127.0.0.1:{port}"
    assert httpx2.post(f"{url}/resume", timeout=30).status_code == 401
    VllmEndpoints(url).resume()
    assert secret_file(port).read_text() == secret
    stop_vllm_server(proc)
    assert not secret_file(port).exists()


def test_a_users_secret_is_not_written_to_disk(start):
    _, port, facts = start(env={"LUDIC_SERVER_SECRET": "one-of-my-own-for-all"})
    assert facts()["environment"]["LUDIC_SERVER_SECRET"] == "one-of-my-own-for-all"
    assert not secret_file(port).exists()


def test_a_server_that_cannot_be_started_leaves_no_secret(tmp_path):
    port, python = free_port(), fake_vllm.install(tmp_path / "venv")
    with pytest.raises(FileNotFoundError):
        start_vllm_server("tiny", "127.0.0.1", port, python=python, log_path=tmp_path / "no" / "log")
    assert not secret_file(port).exists()


def test_on_a_gpu_the_dtype_is_the_models(tmp_path, start):
    python = fake_vllm.install(tmp_path / "gpu", cpu=False)
    _, _, facts = start(python=python, gpu_memory_utilization=0.5, enforce_eager=False)
    arguments = facts()["arguments"]
    assert after(arguments, "--gpu-memory-utilization") == "0.5"
    assert not {"--dtype", "--enforce-eager", "--kv-cache-memory-bytes", "--worker-extension-cls"} & set(arguments)


def test_the_callers_flags_take_precedence(start):
    given = ["--generation-config", "auto", "--dtype=bfloat16", "--max-num-seqs", "8"]
    _, _, facts = start(extra_args=given, env={"VLLM_SERVER_DEV_MODE": "0"})
    arguments = facts()["arguments"]
    assert arguments[-5:] == given
    for flag in ("--generation-config", "--dtype", "--max-num-seqs"):
        assert sum(argument.split("=")[0] == flag for argument in arguments) == 1
    assert facts()["environment"]["VLLM_SERVER_DEV_MODE"] == "0"


def test_a_port_in_use_is_refused():
    """Otherwise the process that listens there would be mistaken for the server."""
    with StubVLLM() as stub, pytest.raises(ConfigError, match=f"port {stub.port}"):
        start_vllm_server("tiny", "127.0.0.1", stub.port)


def test_the_interpreter_is_explicit_or_from_the_environment_or_the_local_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert server_python(None, {}) == sys.executable
    built = fake_vllm.install(tmp_path / ".venv-vllm")
    assert server_python(None, {}) == built
    other = fake_vllm.install(tmp_path / "other")
    assert server_python(None, {"LUDIC_VLLM_PYTHON": other}) == other
    assert server_python(built, {"LUDIC_VLLM_PYTHON": other}) == built
    with pytest.raises(ConfigError, match="make vllm"):
        server_python(tmp_path / "nothing", {})


def test_a_server_can_import_this_package_but_not_its_neighbours(monkeypatch):
    """Packages installed beside it are for this interpreter, not the server's."""
    root = Path(package_root())
    assert [path.name for path in root.iterdir()] == ["ludic"]
    assert (root / "ludic").resolve() == Path(ludic.__file__).resolve().parent
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("PYTHONHOME", "/home")
    env = server_variables("/elsewhere/bin/python", cpu=True, overrides={"PYTHONPATH": "/given"})
    assert env["PYTHONPATH"] == os.pathsep.join([str(root), "/given"])
    assert "PYTHONHOME" not in env
    assert server_variables(sys.executable, cpu=False)["PYTHONPATH"] == os.pathsep.join([str(root), "/ours"])


def test_modules_loaded_by_the_server_need_only_the_standard_library():
    """Its environment has only those dependencies of this package that vLLM also has."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); before = set(sys.modules)\n"
        "import ludic.inference.vllm.in_server.client_tag_middleware, ludic.inference.vllm.in_server.secret_middleware\n"
        "import ludic.inference.vllm.in_server.think_limits, ludic.inference.vllm.in_server.server\n"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    found = subprocess.run(
        [sys.executable, "-S", "-c", code, package_root()], capture_output=True, text=True, timeout=600, check=True
    )
    assert found.stdout.split() == ["ludic"]


def test_servers_left_running_end_with_the_process_that_started_them(tmp_path):
    facts = tmp_path / "facts.json"
    code = (
        "import sys, time; from pathlib import Path\n"
        "from ludic.inference.servers.ports import free_port\n"
        "from ludic.inference.vllm.launch import start_vllm_server\n"
        "proc = start_vllm_server('tiny', '127.0.0.1', free_port(), python=sys.argv[1], stream_output=False)\n"
        "facts = Path(sys.argv[2])\n"
        "while not facts.exists() or not facts.read_text(): time.sleep(0.01)\n"
    )
    env = {**os.environ, "FAKE_VLLM": "deaf", "FAKE_VLLM_FACTS": str(facts), "PYTHONPATH": str(Path(ludic.__file__).parents[1])}
    python = fake_vllm.install(tmp_path / "venv")
    subprocess.run([sys.executable, "-c", code, python, str(facts)], env=env, timeout=600, check=True)
    assert wait_for_end(json.loads(facts.read_text())["child"])


# -- `ludic serve`


def serving(tmp_path, mode, *options):
    """`ludic serve` as a process, and the arguments of its server."""
    facts = tmp_path / "facts.json"
    env = {**os.environ, "FAKE_VLLM": mode, "FAKE_VLLM_FACTS": str(facts), "PYTHONPATH": str(Path(ludic.__file__).parents[1])}
    port = free_port()
    python = fake_vllm.install(tmp_path / "venv")
    command = [sys.executable, "-m", "ludic.cli", "serve", "tiny", "--port", str(port), "--python", python, *options]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True), facts, port


def test_serve_reports_readiness_and_ctrl_c_stops_everything(tmp_path):
    options = ["--lora-rank", "8", "--weights", "disk", "--client-tags", "--batch-invariant", "--", "--seed", "7"]
    proc, facts, port = serving(tmp_path, "ok", *options)
    said = []
    deadline = threading.Timer(90, proc.kill)
    deadline.start()
    try:
        for line in proc.stderr:
            said.append(line)
            if line.startswith("ready"):
                break
        found = json.loads(facts.read_text())
        proc.send_signal(signal.SIGINT)
        rest = proc.stderr.read()
        assert proc.wait() == 0
    finally:
        deadline.cancel()
        proc.kill()
        proc.stderr.close()
    assert f"http://127.0.0.1:{port}" in said[-1]
    assert re.search(f"trainers .*read it from {secret_file(port)}", said[-2])
    assert found["environment"]["LUDIC_SERVER_SECRET"] not in "".join(said) + rest
    assert "Traceback" not in rest
    assert found["arguments"][-2:] == ["--seed", "7"]
    assert after(found["arguments"], "--max-lora-rank") == "8"
    assert "--batch-invariant" not in found["arguments"]
    assert found["environment"]["VLLM_BATCH_INVARIANT"] == "1"
    assert wait_for_end(found["child"])


def test_without_vllm_serve_says_how_to_install_it(tmp_path):
    from typer.testing import CliRunner

    from ludic.cli.app import app

    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n', encoding="utf-8")  # hides what is installed
    python.chmod(0o755)
    result = CliRunner().invoke(app, ["serve", "tiny", "--port", str(free_port()), "--python", str(python)])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "has no vLLM" in said
    assert "`make vllm`" in said
    assert "pip install 'vllm>=0.32'" in said


def test_serve_fails_when_the_server_does_not_start(tmp_path):
    proc, _, _ = serving(tmp_path, "exit")
    _, err = proc.communicate(timeout=600)
    assert proc.returncode == 1
    assert "ended with status 3" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("cpu", "settings", "backend"),
    [
        (True, {}, "gloo"),
        (False, {}, "ludic_nccl"),
        (False, {"device": "cpu"}, "gloo"),
        (True, {"weights": "disk"}, "disk"),
        (True, {"weights": "none"}, None),
    ],
)
def test_the_weight_transport_depends_on_the_device_by_default(tmp_path, cpu, settings, backend):
    from ludic.cli.serve import _choose_weights

    python = fake_vllm.install(tmp_path / "venv", cpu=cpu)
    assert _choose_weights(SimpleNamespace(**{"weights": "auto", "device": "auto", "python": python, **settings})) == backend


@pytest.mark.parametrize("option", [["--device", "tpu"], ["--weights", "carrier"], ["--logprobs-mode", "some"]])
def test_serve_refuses_unknown_options(option):
    from typer.testing import CliRunner

    from ludic.cli.app import app

    result = CliRunner().invoke(app, ["serve", "tiny", *option])
    assert result.exit_code == 2
    assert "must be one of" in result.output
