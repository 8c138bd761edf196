import asyncio

import pytest
from fake_sandboxes import FakePool

from ludic.envs.code_exec.adapters import APPSTestAdapter
from ludic.envs.code_exec.env import CHECKOUT_S, CodeExecConfig, CodeExecEnv
from ludic.envs.code_exec.types import CompileResult, CompileStatus, RunStatus
from ludic.errors import ConfigError, GradingError

ROW = {"question": "Print 4.", "inputs": ["", ""], "outputs": ["4", "4"], "problem_id": "p"}


def play(action, row=ROW, *, answers=None, reset=True, steps=1, **config):
    """The outcomes of the steps, and the pool."""

    async def main():
        pool = FakePool(2, answers=answers)
        await pool.start()
        env = CodeExecEnv(row, sandbox_pool=pool, test_adapter=APPSTestAdapter(), config=CodeExecConfig(**config))
        outcomes = []
        for _ in range(steps):
            if reset:
                await env.env_reset()
            outcomes.append(await env.env_step(action))
        await pool.drain_pending_resets()
        assert pool.available == 2  # every sandbox came back
        await pool.shutdown()
        return outcomes, pool

    return asyncio.run(main())


def test_a_reset_shows_the_problem():
    async def main():
        env = CodeExecEnv(ROW, sandbox_pool=FakePool(1), test_adapter=APPSTestAdapter(), system_prompt="s")
        assert env.suggested_sysprompt == "s"
        assert "Error" in env.env_current_obs()
        assert "reset" in env.env_current_obs()
        obs, info = await env.env_reset(seed=3)
        assert obs == env.env_current_obs() == "Print 4."
        assert (info["problem_id"], info["num_tests"], info["python_version"], len(info["tests_hash"])) == ("p", 2, "3.11", 16)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answers", "config", "reward", "obs"),
    [
        ({}, {}, 1.0, "All 2 tests passed"),
        ({"4": "5"}, {}, 0.0, "Tests failed: 0/2 passed\nFirst failure: First diff at character 0: '5' instead of '4'"),
        ({"4": RunStatus.RUNTIME_ERROR}, {"include_stderr_in_obs": False}, 0.0,
         "Tests failed: 0/2 passed\nFirst failure: Runtime error (exit status 1):\nit failed"),
        ({"4": RunStatus.TIMEOUT}, {"max_error_length": 5}, 0.0, "Tests failed: 0/2 passed\nFirst failure: The p...\nStderr: it fa..."),
        ({"4": CompileResult(CompileStatus.SYNTAX_ERROR, "oh no", 2)}, {}, -0.1, "Compilation failed: oh no (line 2)"),
    ],
)  # fmt: skip
def test_rewards_and_what_the_model_is_told(answers, config, reward, obs):
    (outcome,), _ = play("4", answers=answers, **config)
    assert (outcome.reward, outcome.obs, outcome.terminated, outcome.truncated) == (reward, obs, True, False)


def test_partial_credit_is_the_share_that_passes():
    row = {**ROW, "outputs": ["5", "4"]}
    assert play("4", row)[0][0].reward == 0.0
    (outcome,), _ = play("4", row, partial_credit=True)  # the first failure does not end it
    assert (outcome.reward, outcome.info["passed"], outcome.info["total"]) == (0.5, 1, 2)


def test_only_the_first_tests_count():
    (outcome,), _ = play("4", {**ROW, "outputs": ["4", "5"]}, max_tests=1)
    assert outcome.info["total"] == 1
    assert outcome.reward == 1.0


@pytest.mark.parametrize(
    ("action", "row", "reset", "reward", "error"),
    [
        ("4", ROW, False, -1.0, "reset_not_called"),
        (" \n", ROW, True, -0.1, "empty_code"),
        ("4", {**ROW, "inputs": [], "outputs": []}, True, -1.0, "no_tests_extracted"),
    ],
)
def test_answers_that_are_not_judged(action, row, reset, reward, error):
    (outcome,), pool = play(action, row, reset=reset)
    assert (outcome.reward, outcome.terminated, outcome.info["error"]) == (reward, True, error)
    assert not any(sandbox.runs for sandbox in pool.made)


def test_info_has_each_test():
    (outcome,), _ = play("4", answers={"4": RunStatus.RUNTIME_ERROR})
    first, second = outcome.info["test_results"]
    assert first["test_id"] == "test_0"
    assert first["run_status"] == "runtime_error"
    assert first["ran"]
    assert first["compiled"]
    assert first["failure_reason"].startswith("Runtime error")
    assert second["run_status"] == "not_run"
    assert set(outcome.info["timing"]) == {"total_compile_ms", "total_run_ms", "total_execution_ms"}


def test_a_program_is_run_once_if_results_are_kept():
    (first, second), pool = play("4", steps=2)
    assert (first.info["cache_hit"], second.info["cache_hit"]) == (False, True)
    assert sum(sandbox.runs for sandbox in pool.made) == 2
    assert second.reward == 1.0
    _, pool = play("4", steps=2, use_cache=False)
    assert sum(sandbox.runs for sandbox in pool.made) == 4


def test_results_are_kept_by_all_that_a_verdict_depends_on():
    row = {**ROW, "inputs": ["", "", ""], "outputs": ["5", "4", "4"]}

    async def main():
        pool = FakePool(1)
        await pool.start()
        rewards = []
        for config in ({}, {"partial_credit": True}, {"timeout_per_test_s": 1.0}, {}):
            env = CodeExecEnv(row, sandbox_pool=pool, test_adapter=APPSTestAdapter(), config=CodeExecConfig(**config))
            await env.env_reset()
            outcome = await env.env_step("4")
            rewards.append((outcome.reward, outcome.info["cache_hit"]))
        await pool.shutdown()
        return rewards

    assert asyncio.run(main()) == [(0.0, False), (2 / 3, False), (0.0, False), (0.0, True)]


def test_sandboxes_that_fail_are_not_a_reward_of_0():
    with pytest.raises(GradingError, match=r"problem p .*3 sandboxes: .*OSError: gone"):
        play("4", answers={"4": OSError("gone")})


def test_a_program_waits_for_a_sandbox_as_long_as_it_must(monkeypatch):
    """Then the episode fails, too: nobody judged its program."""
    waited = []

    async def checkout(pool, timeout_s=30.0):
        waited.append(timeout_s)
        raise TimeoutError("none was free")

    monkeypatch.setattr(FakePool, "checkout", checkout)
    with pytest.raises(TimeoutError, match="none was free"):
        play("4")
    assert waited == [CHECKOUT_S]


def test_a_program_whose_sandbox_failed_is_judged_in_another():
    class Once(dict):
        def get(self, key, default=None):
            return super().pop(key, default)

    (outcome,), _ = play(
        "4", {**ROW, "inputs": [""], "outputs": ["4"]}, answers=Once({"4": OSError("gone")}), compile_first=False
    )
    assert outcome.reward == 1.0


@pytest.mark.parametrize(
    "config", [{"max_tests": 0}, {"timeout_per_test_s": 0}, {"timeout_per_test_s": float("inf")}, {"memory_limit_mb": -1}]
)
def test_limits_that_judge_nothing_are_refused(config):
    with pytest.raises(ConfigError, match=next(iter(config))):
        CodeExecConfig(**config)


def test_tests_are_hashed_once_for_all_programs(monkeypatch):
    """By their adapter: they may be megabytes."""
    hashed = []
    for name in ("types.json.dumps", "types.hash_calls"):
        monkeypatch.setattr(f"ludic.envs.code_exec.{name}", lambda *_, **__: pytest.fail("hashed again"))
    hash_tests = APPSTestAdapter.hash_tests
    monkeypatch.setattr(APPSTestAdapter, "hash_tests", lambda self, tests: hashed.append(1) or hash_tests(self, tests))

    async def main():
        pool = FakePool(1)
        await pool.start()
        env = CodeExecEnv(ROW, sandbox_pool=pool, test_adapter=APPSTestAdapter())
        await env.env_reset()
        return [(await env.env_step(program)).info["tests_hash"] for program in ("4", "5", "6")]

    hashes = asyncio.run(main())
    assert hashes == [hash_tests(APPSTestAdapter(), APPSTestAdapter().get_tests(ROW))] * 3
    assert len(hashed) == 1
