"""Thinking that is closed after a number of tokens: which token each row of a batch must emit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import ludic
from ludic.inference.vllm.in_server.server import default_variables, read_port, server_command
from ludic.inference.vllm.in_server.think_limits import ThinkLimits, parse_max_think, respects_limit

CLOSING = [7, 8, 9]


def test_the_closing_tokens_are_forced_one_by_one_after_the_limit():
    limits, output = ThinkLimits(CLOSING), []
    limits.add(0, 2, output)
    limits.add(1, None, [1, 1, 1])
    forced = []
    for _ in range(7):
        token = limits.forced_tokens().get(0)
        forced.append(token)
        output.append(1 if token is None else token)
    assert forced == [None, None, 7, 8, 9, None, None]
    assert output == [1, 1, 7, 8, 9, 1, 1]


def test_thinking_that_closed_by_itself_is_left_alone():
    limits = ThinkLimits(CLOSING)
    limits.add(0, 4, [7, 8, 9, 1])
    limits.add(1, 4, [1, 7, 8, 1])
    assert limits.forced_tokens() == {1: 7}


def test_limits_move_with_their_requests():
    limits = ThinkLimits(CLOSING)
    limits.add(0, 1, [1])
    limits.add(1, 1, [1, 7])
    limits.move(0, 1, swap=True)
    assert limits.forced_tokens() == {1: 7, 0: 8}
    limits.move(1, 5, swap=False)
    assert limits.forced_tokens() == {5: 7, 0: 8}
    limits.move(3, 0, swap=False)  # a request without a limit takes over the row
    assert limits.forced_tokens() == {5: 7}
    limits.add(5, None, [1])  # and so does a new one
    limits.remove(9)
    assert limits.forced_tokens() == {}


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.none() | st.integers(1, 3)),
        st.tuples(st.just("remove"), st.integers(0, 3), st.none()),
        st.tuples(st.sampled_from(["move", "swap"]), st.integers(0, 3), st.integers(0, 3)),
    ),
    max_size=12,
)


@given(operations)
def test_rows_follow_a_list_with_the_same_operations(steps):
    limits, rows = ThinkLimits(CLOSING), [None] * 4
    for kind, row, other in steps:
        if kind == "add":
            output = [1] * 3
            limits.add(row, other, output)
            rows[row] = other
        elif kind == "remove":
            limits.remove(row)
            rows[row] = None
        elif row != other:
            limits.move(row, other, swap=kind == "swap")
            rows[row], rows[other] = rows[other] if kind == "swap" else None, rows[row]
    assert {row: thought.limit for row, thought in limits.rows.items()} == {i: n for i, n in enumerate(rows) if n is not None}


def test_an_answer_shows_whether_the_server_enforced_the_limit():
    assert respects_limit([1, 1], 2, CLOSING)
    assert respects_limit([1, 1, 7, 8], 2, CLOSING)  # truncated by max_tokens
    assert respects_limit([1, 1, 7, 8, 9, 1], 2, CLOSING)
    assert respects_limit([7, 8, 9, 1, 1, 1], 3, CLOSING)
    assert not respects_limit([1, 1, 1, 1, 1], 2, CLOSING)
    assert not respects_limit([1, 1, 1, 7, 8, 9], 2, CLOSING)


@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
def test_a_limit_must_be_a_positive_integer(value):
    with pytest.raises(ValueError, match="max_think must be a positive integer"):
        parse_max_think(value)
    assert parse_max_think(None) is None
    assert parse_max_think(3) == 3


def test_a_tokenizer_without_the_closing_tokens_is_refused():
    with pytest.raises(ValueError, match="to no tokens"):
        ThinkLimits([])


# -- `python -m ludic.inference.vllm.in_server.server`


def test_the_users_flags_take_precedence_over_those_that_training_needs():
    arguments = ["--model", "m", "--host", "0.0.0.0", "--logprobs-mode=raw_logprobs", "--batch-invariant"]
    command, variables = server_command(arguments, {"VLLM_SERVER_DEV_MODE": "0"})
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert command[-5:] == ["--model", "m", "--host", "0.0.0.0", "--logprobs-mode=raw_logprobs"]
    assert command.count("--host") == 1
    assert "--logprobs-mode" not in command
    assert command[command.index("--generation-config") + 1] == "vllm"
    assert (
        command[command.index("--logits-processors") + 1] == "ludic.inference.vllm.in_server.think_processor:GlobalThinkProcessor"
    )
    assert "--enable-scale-out" in command
    assert (variables["VLLM_BATCH_INVARIANT"], variables["VLLM_SERVER_DEV_MODE"]) == ("1", "0")
    command, variables = server_command([], {})
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert "VLLM_BATCH_INVARIANT" not in variables
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert default_variables(["--weight-transfer-config"]).items() <= variables.items()  # as `ludic serve` passes them
    assert command[command.index("--middleware") + 1] == "ludic.inference.vllm.in_server.secret_middleware.SecretMiddleware"
    assert variables["LUDIC_SERVER_SECRET"] not in " ".join(command)


def test_the_module_replaces_itself_with_the_server(tmp_path):
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    package.joinpath("api_server.py").write_text(
        "import os, sys; print(os.environ['VLLM_BATCH_INVARIANT'], os.environ['VLLM_SERVER_DEV_MODE'], *sys.argv[-2:])"
    )
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(ludic.__file__).parents[3])]),
        "VLLM_SERVER_DEV_MODE": "0",
    }
    command = [sys.executable, "-m", "ludic.inference.vllm.in_server.server", "--batch-invariant", "--model", "m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=True)
    assert done.stdout.split() == ["1", "0", "--model", "m"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [({}, "an environment with `make vllm`"), ({"LUDIC_SERVER_SECRET": "short"}, "at least 16")],
)
def test_the_module_reports_missing_requirements(tmp_path, environment, message):
    if "LUDIC_SERVER_SECRET" in environment:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").touch()
    paths = os.pathsep.join([str(tmp_path), str(Path(ludic.__file__).parents[3])])
    command = [sys.executable, "-m", "ludic.inference.vllm.in_server.server", "--model", "m"]
    env = {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


@pytest.mark.parametrize(
    ("arguments", "port"),
    [([], 8000), (["--port", "8001"], 8001), (["--port=8002", "--model", "m"], 8002), (["--port", "1", "--port", "8003"], 8003)],
)
def test_the_module_stores_the_secret_for_its_port(arguments, port):
    assert read_port(arguments) == port
