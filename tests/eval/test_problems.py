"""Several answers per problem: reproducible seeds, independent answers, and numbers by hand."""

import pytest
from playing import FOR_RL, ScriptedClient, play, protocol

from ludic.envs import DatasetQAEnv
from ludic.errors import ConfigError
from ludic.eval import ProblemEvaluator
from ludic.eval.evaluator import repeat_requests
from ludic.training import EnvSpec, ProtocolSpec, Reducer, RolloutEngine, RolloutRequest
from ludic.types import ChatResponse


def problem(name, **settings):
    sample = {"id": name, "question": name, "answer": "yes"}
    meta = {"problem_id": name, **settings.pop("meta", {})}
    return RolloutRequest(EnvSpec("qa", {"sample": sample}), ProtocolSpec("single"), inference=FOR_RL, meta=meta, **settings)


class Fails(DatasetQAEnv):
    def env_step(self, action):
        if action == "fail":
            raise OSError("the grader is gone")
        return super().env_step(action)


class BySeed(ScriptedClient):
    """A client whose answer depends only on the seed. Records the seeds by question."""

    def __init__(self):
        super().__init__("")
        self.seeds = {}

    async def complete(self, request):
        question = request.messages[-1]["content"]
        self.seeds.setdefault(question, []).append(request.seed)
        text = "yes" if request.seed % 3 else "no"
        return ChatResponse("fail" if question == "broken" and request.seed % 2 else text), {}


def engine(client, **settings):
    return RolloutEngine(
        env_registry={"qa": Fails}, protocol_registry={"single": lambda: protocol(client)}, max_retries=0, **settings
    )


def test_every_answer_has_its_own_seed_that_does_not_depend_on_k():
    few, many = (repeat_requests([problem("a"), problem("b")], k=k, seed=3) for k in (2, 64))
    seeds = {(r.meta["problem_id"], r.meta["sample_index"]): r.sampling_seed for r in many}
    assert len(set(seeds.values())) == 128
    assert all(seeds[r.meta["problem_id"], r.meta["sample_index"]] == r.sampling_seed for r in few)
    assert {r.sampling_seed for r in repeat_requests([problem("a")], k=2, seed=4)}.isdisjoint(seeds.values())
    assert all(r.num_episodes == 1 for r in few)


def test_the_answers_to_a_problem_share_its_environment():
    requests = repeat_requests([problem("a"), problem("b"), problem("c", env_seed=77)], k=3, seed=0)
    by_problem = {name: {r.env_seed for r in requests if r.meta["problem_id"] == name} for name in "abc"}
    assert [len(seeds) for seeds in by_problem.values()] == [1, 1, 1]
    assert by_problem["a"] != by_problem["b"]
    assert by_problem["c"] == {77}


def test_a_problem_without_an_id_is_named_by_its_position():
    bare = RolloutRequest(EnvSpec("qa"), ProtocolSpec("single"))
    assert [r.meta["problem_id"] for r in repeat_requests([bare, bare], k=1, seed=0)] == ["0", "1"]


def test_numbers_follow_from_the_answers_and_are_reproducible():
    client = BySeed()
    evaluator = ProblemEvaluator(engine(client), lambda: [problem("a"), problem("b")], k=8)
    found = play(evaluator.measure())
    right = {name: sum(seed % 3 > 0 for seed in client.seeds[name]) for name in "ab"}
    assert found.accuracy.value == pytest.approx((right["a"] + right["b"]) / 16)
    assert list(found.pass_at_k) == [1, 2, 4, 8]
    assert play(evaluator.measure()) == found
    assert client.seeds["a"][:8] == client.seeds["a"][8:]


def test_when_one_answer_fails_the_others_of_the_problem_still_count():
    client = BySeed()
    requests = [problem("broken", meta={"group_id": "g"}), problem("fine", meta={"group_id": "g"})]
    found = play(ProblemEvaluator(engine(client), lambda: requests, k=8).measure())
    failed = sum(seed % 2 for seed in client.seeds["broken"])
    assert 0 < failed < 8
    assert found.num_failed_episodes == failed
    assert [(p.problem_id, p.answers, p.failed) for p in found.problems] == [("broken", 8 - failed, failed), ("fine", 8, 0)]
    assert found.errors == {"OSError: the grader is gone": failed}


def test_as_an_evaluator_it_returns_records_and_reduced_metrics():
    evaluator = ProblemEvaluator(
        engine(BySeed()),
        lambda: [problem("a")],
        k=4,
        reducers={"right": Reducer("count_true", "correct", normalize_by="rollouts")},
    )
    records, metrics = play(evaluator.eval())
    assert [record["sample_index"] for record in records] == [0, 1, 2, 3]
    assert metrics["right"] == metrics["accuracy"] == metrics["pass@1"]
    records, metrics = play(evaluator.eval(requests=[problem("a"), problem("b")], reducers={}))
    assert len(records) == 8
    assert "right" not in metrics


def test_an_evaluation_with_k_of_zero_is_refused():
    with pytest.raises(ConfigError, match=r"k \(0\)"):
        ProblemEvaluator(engine(BySeed()), list, k=0)
