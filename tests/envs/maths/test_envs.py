"""GSM8K and MATH as environments and as rewards, played through the engine."""

import asyncio
import json
from functools import partial

import pytest
from playing import FOR_RL, ScriptedClient, protocol

from ludic.data import load_data
from ludic.envs.maths import GSM8KEnv, MATHEnv, gsm8k_reward, math_reward
from ludic.errors import DataError, GradingError, RolloutError
from ludic.training.credit_assignment import GroupNormalizedReturn
from ludic.training.rollouts.engine import RolloutEngine
from ludic.training.types import EnvSpec, ProtocolSpec, RolloutRequest

GSM8K_ROW = {
    "question": "A bakery sells 3 boxes of 12 rolls and 7 single rolls. How many rolls does it sell?",
    "answer": "The boxes hold 3 * 12 = <<3*12=36>>36 rolls.\nIn all it sells 36 + 7 = <<36+7=43>>43 rolls.\n#### 43",
}
MATH_ROW = {
    "problem": "What is the sum of the solutions of $2x^2 - 3x + 1 = 0$?",
    "solution": r"By Vieta the sum is $-\frac{-3}{2} = \boxed{\frac{3}{2}}$.",
    "level": "Level 2",
}


class FixedGrader:
    """A grader with fixed verdicts; an exception is raised."""

    def __init__(self, *verdicts):
        self.verdicts, self.asked = list(verdicts), []

    async def grade(self, answer, target):
        self.asked.append((answer, target))
        verdict = self.verdicts.pop(0)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict


def test_an_environment_shows_the_question_and_ends_with_the_grade():
    grader = FixedGrader(True)
    env = GSM8KEnv(GSM8K_ROW, grader=grader)
    assert env.env_reset()[0] == GSM8K_ROW["question"]
    assert "\\boxed" in env.suggested_sysprompt
    outcome = asyncio.run(env.env_step("36 + 7 = 43, so \\boxed{43}"))
    assert (outcome.reward, outcome.terminated, outcome.info["correct"]) == (1.0, True, True)
    assert (outcome.info["target_answer"], grader.asked) == ("43", [("\\boxed{43}", "43")])
    with pytest.raises(RolloutError, match="already answered"):
        asyncio.run(env.env_step("43"))


def test_rewards_and_system_prompt_can_be_set():
    env = MATHEnv(MATH_ROW, grader=FixedGrader(False), system_prompt=None, incorrect_reward=-0.5)
    env.env_reset()
    assert env.suggested_sysprompt is None
    assert asyncio.run(env.env_step("2")).reward == -0.5


def test_math_accepts_both_names_of_its_columns():
    for row in (MATH_ROW, {"question": "q", "answer": r"\boxed{\frac{3}{2}}"}):
        grader = FixedGrader(True)
        env = MATHEnv(row, grader=grader)
        env.env_reset()
        asyncio.run(env.env_step(r"\boxed{1.5}"))
        assert grader.asked == [(r"\boxed{1.5}", r"\frac{3}{2}")]
    with pytest.raises(DataError, match="needs answer or solution; it has problem"):
        MATHEnv({"problem": "q"})


def requests(kind, row, members, group):
    return [
        RolloutRequest(EnvSpec(kind, {"sample": row}), ProtocolSpec("p"), inference=FOR_RL, meta={"group_id": group})
        for _ in range(members)
    ]


def test_rows_of_files_are_played_and_graded_by_math_verify(tmp_path, grader):
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(GSM8K_ROW) + "\n")
    row = load_data(str(tmp_path / "gsm8k.jsonl"), columns={"prompt": "question"}).rows[0]
    client = ScriptedClient("36 + 7 = 43\n#### 43", "It sells $43$ rolls.", "It sells 36 rolls.")
    engine = RolloutEngine(
        env_registry={"gsm8k": partial(GSM8KEnv, grader=grader)}, protocol_registry={"p": lambda: protocol(client)}
    )
    rollouts = asyncio.run(engine.generate_rollouts(requests("gsm8k", row, 3, "g"), 1, concurrency=1))
    assert [rollout.total_reward for rollout in rollouts] == [1.0, 1.0, 0.0]
    assert client.requests[0].messages[0]["role"] == "system"


def test_a_failing_grader_is_counted_and_costs_only_its_group():
    """Otherwise a hang or crash of the grader would become a reward of 0 that is trained on."""
    hang = GradingError("grading took longer than 5 s")
    grader = FixedGrader(True, hang, hang, True, False)  # the second episode hangs, and so does its retry
    engine = RolloutEngine(
        env_registry={"math": lambda sample: MATHEnv(sample, grader=grader)},
        protocol_registry={"p": lambda: protocol(ScriptedClient("1.5"))},
    )
    wanted = [*requests("math", MATH_ROW, 2, "lost"), *requests("math", MATH_ROW, 2, "kept")]
    batch = asyncio.run(engine.generate_batch(wanted, credit_assigner=GroupNormalizedReturn(2), concurrency=1))
    assert [item.meta["group_id"] for item in batch.items] == ["kept", "kept"]
    assert [item.meta["total_reward"] for item in batch.items] == [1.0, 0.0]
    assert {key: batch.meta[key] for key in ("num_episodes", "num_failed_episodes", "num_dropped_groups")} == {
        "num_episodes": 4,
        "num_failed_episodes": 1,
        "num_dropped_groups": 1,
    }


async def test_as_reward_functions_they_grade_text_and_messages_and_return_errors_in_place():
    error = GradingError("too long")
    reward = gsm8k_reward(FixedGrader(True, error, False))
    chat = [[{"role": "assistant", "content": text}] for text in ("43", "x", "36")]
    assert await reward(completions=chat, answer=[GSM8K_ROW["answer"]] * 3, other=[1, 2, 3]) == [1.0, error, 0.0]
    grader = FixedGrader(True)
    assert await math_reward(grader)(completions=["1.5"], solution=[None], answer=["3/2"]) == [1.0]
    assert grader.asked == [("1.5", "3/2")]


async def test_the_target_is_the_bare_answer_even_if_the_solution_has_another_box():
    """As in AIME 2024, whose solutions box numbers of their own, or none."""
    row = {"problem": "q", "solution": r"With $\boxed{6}$ below it is a half.", "answer": r"\frac{1}{2}"}
    grader = FixedGrader(True, True)
    env = MATHEnv(row, grader=grader)
    env.env_reset()
    await env.env_step("0.5")
    await math_reward(grader)(completions=["0.5"], solution=[row["solution"]], answer=[row["answer"]])
    assert grader.asked == [("0.5", r"\frac{1}{2}")] * 2


async def test_a_row_without_a_target_is_a_data_error():
    with pytest.raises(DataError, match="no number after ####"):
        gsm8k_reward().check_row({"answer": "43"})
    with pytest.raises(DataError, match="needs answer or solution"):
        math_reward().check_row({"question": "q"})
    with pytest.raises(DataError, match="no number after ####"):
        await gsm8k_reward(FixedGrader(True))(completions=["43"], answer=["43"])
