"""The measurement of seeds: which answers are asked for, and what is computed of them."""

import asyncio
import json
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
import torch
from training_samples import tiny_model

from ludic.errors import ConfigError, DataError
from ludic.training.info_seed import InfoSeed, SeedEvaluator, seed_heatmap, seed_metrics, seed_of
from ludic.training.loss.info_seed import seed_directions
from ludic.types import ImageSpan, Rollout, Step, TokenTrace

SEEDS = 3


@dataclass
class Sampling:
    temperature: float = 0.7
    top_p: float = 0.9
    max_new_tokens: int | None = None
    concurrency: int = 4


class Digits:
    """A task of which the plain answer, and the answers to the seeds above 1, are right."""

    max_turns, max_new_tokens, success_reward = 1, 5, None

    def suites(self):
        return {"first": [{"id": str(place)} for place in range(4)], "second": [{"id": "none"}]}


class Engine:
    """Answers of 2 to 5 tokens; those to problem 3 are all wrong, and the last one is lost."""

    async def generate_rollouts(self, *, requests, max_steps, timeout_s, concurrency):
        self.requests = list(requests)
        return [self.play(request) for request in self.requests[:-1]]

    def play(self, request):
        draw = Random(request.sampling_seed)
        seed = request.meta.get("seed_id")
        number = int(request.env.kwargs["problem"]["id"])
        prompt = [10 + number, 11, *([] if seed is None else [20 + seed])]
        answer = [draw.randrange(1, 30) for _ in range(draw.randrange(2, 6))]
        reward = float(number < 3 and (seed or 9) > 1)
        step = Step(
            index=0,
            prev_obs="",
            action="",
            next_obs=None,
            reward=reward,
            truncated=False,
            terminated=True,
            info={},
            trace=TokenTrace(prompt, answer),
        )
        return Rollout(id=str(request.sampling_seed), steps=[step], meta={"request_meta": request.meta})


def evaluate(*, engine=None, **options):
    engine = Engine() if engine is None else engine
    evaluator = SeedEvaluator(engine, Digits(), InfoSeed(SEEDS, **options.pop("settings", {})), rollout=Sampling(), **options)
    records, metrics = asyncio.run(evaluator.eval())
    assert records == []
    return engine, evaluator, metrics


def test_each_problem_is_asked_once_for_each_seed_and_once_plainly():
    engine, _, metrics = evaluate(samples=2, prompts=3)
    assert [seed_of({"request_meta": request.meta}) for request in engine.requests] == [0, 1, 2, 3] * 6
    assert [request.env.kwargs["problem"]["id"] for request in engine.requests[::4]] == ["0", "1", "2", "0", "1", "2"]
    sampling = {(request.inference.sampling.temperature, request.inference.sampling.max_tokens) for request in engine.requests}
    assert sampling == {(0.7, 5)}
    assert len({request.sampling_seed for request in engine.requests}) == len(engine.requests)
    assert metrics == {"eval_seed/pass_at_n": 1.0}  # without a model nothing is represented


def test_a_problem_counts_if_one_seeded_answer_is_right():
    """Of 4 problems, all answers to the last one are wrong."""
    assert evaluate()[2]["eval_seed/pass_at_n"] == 0.75


@pytest.mark.parametrize("loss", ["infonce", "ce"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_answers_are_represented_under_the_plain_prompt(tmp_path, loss, pooling):
    """One answer at a time, with the states by hand: batches and padding change nothing."""
    model = tiny_model()
    computed = []
    hook = model.lm_head.register_forward_hook(lambda _, __, output: computed.append(output.numel()))
    engine, evaluator, metrics = evaluate(model=model, samples=9, heatmaps=tmp_path, settings={"pooling": pooling, "loss": loss})
    hook.remove()
    assert computed == [0, 0]  # no logits
    rows, seeds = [], []
    for request in engine.requests[:-1]:
        played = engine.play(request)
        trace, seed = played.steps[0].trace, seed_of(played.meta)
        if seed:
            ids = torch.tensor([[*trace.prompt_token_ids[:2], *trace.completion_token_ids]])
            with torch.no_grad():
                states = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, 2:].double()
            rows.append((states.mean(0) if pooling == "mean" else states[-1]).numpy())
            seeds.append(seed)
    assert len(rows) > 64  # several batches
    head = seed_directions(SEEDS, len(rows[0])) if loss == "ce" else None
    expected = seed_metrics(np.array(rows), seeds, head=head)
    assert {key.removeprefix("eval_seed/") for key in metrics} == {"pass_at_n", "pred_acc", "diversity_l2"}
    for name, value in expected.items():
        assert metrics[f"eval_seed/{name}"] == pytest.approx(value, abs=1e-5)
    written = json.loads((tmp_path / "seed_heatmap_step0.json").read_text())
    assert written["labels"] == [1, 2, 3]
    np.testing.assert_allclose(written["matrix"], seed_heatmap(rows, seeds)["matrix"], atol=1e-5)
    assert evaluator.step == 1
    assert model.training == tiny_model().training


def test_answers_to_images_are_not_represented(tmp_path):
    class Seeing(Engine):
        def play(self, request):
            rollout = super().play(request)
            rollout.steps[0].trace = replace(rollout.steps[0].trace, images=(ImageSpan("a", 0, 1),))
            return rollout

    with pytest.raises(DataError, match="the prompts have images"):
        evaluate(model=tiny_model(), engine=Seeing(), heatmaps=tmp_path)


def test_wrong_settings_are_refused(tmp_path):
    for options, message in (({"samples": 0}, "samples"), ({"heatmaps": tmp_path}, "pass model=")):
        with pytest.raises(ConfigError, match=message):
            SeedEvaluator(Engine(), Digits(), InfoSeed(2), rollout=Sampling(), **options)
