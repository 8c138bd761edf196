"""The sampler of a run: what the settings mean, overlapped runs, and one run with a real vLLM
server."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import fake_vllm
import httpx2
import pytest
import torch
from faulty_server import HANG
from safetensors.torch import load_file
from stub_policy_server import StubPolicyServer
from stub_vllm import StubVLLM
from stub_weight_server import same
from tiny_vision import make_tiny_vision
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.errors import ConfigError
from ludic.models.images.features import set_trained_parts
from ludic.models.published import published_weights
from ludic.models.saving import save_policy
from ludic.recipes.build import build_task
from ludic.recipes.compose import compose, to_yaml
from ludic.recipes.model import make_small_model
from ludic.recipes.processes import LogprobConvention, choose_kind, choose_logprob_convention
from ludic.runs.reinforce import RLRun
from ludic.runs.report.reinforce import summarize_mismatch, summarize_overlap, summarize_weight_sync
from ludic.runs.report.summary import sum_phases
from ludic.runs.sampler import _run_server, check_inference, make_preflight, open_sampler
from ludic.tasks.episodic import as_episodic
from ludic.training.loop.step_record import PhaseTimer


def train(*arguments):
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], "local"),
        (["inference=local"], "local"),
        (["inference=vllm"], "vllm"),
        (["inference.python=/somewhere/python"], "vllm"),
        (["inference.url=http://127.0.0.1:8000"], "vllm"),
        (["inference.url=[http://127.0.0.1:8000,http://127.0.0.1:8001]"], "vllm"),
    ],
)
def test_a_keyword_an_interpreter_or_an_address_selects_the_engine(given, expected, tmp_path):
    recipe = compose(given)
    assert choose_kind(recipe.inference) == expected
    (tmp_path / "again.yaml").write_text(to_yaml(recipe))
    assert compose([str(tmp_path / "again.yaml")]).inference == recipe.inference


@pytest.mark.parametrize(
    ("given", "threshold"),
    [
        ([], 0.02),
        (["dtype=bfloat16"], 0.1),  # SmolLM2-135M differs from itself by 0.035 nats there
        (["trainer.mixed_precision_dtype=bf16"], 0.1),
        (["quantization=int8", "lora.rank=4"], 0.1),
        (["dtype=bfloat16", "inference.preflight_threshold=0.01"], 0.01),
    ],
)
def test_coarse_rounding_is_no_disagreement(given, threshold):
    recipe = compose(given)
    checked = make_preflight(recipe, as_episodic(build_task(recipe.task)), None, SimpleNamespace(client=None))
    assert checked.threshold == threshold


def test_a_recipe_file_can_set_the_sampler_in_one_word(tmp_path):
    (tmp_path / "mine.yaml").write_text("recipe: sort\ninference: vllm\n")
    assert compose([str(tmp_path / "mine.yaml")]).inference.kind == "vllm"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["inference=tgi"], r"inference.kind \(tgi\) .*local, vllm"),
        (
            ["inference=local", "inference.url=http://127.0.0.1:1"],
            r"inference.url \(http://127.0.0.1:1\) .* inference.kind=local; leave one",
        ),
        (
            ["inference.url=http://127.0.0.1:1", "inference.python=python"],
            r"inference.python \(python\) .* inference.url; leave one",
        ),
        (["inference.batches_ahead=-1"], r"inference.batches_ahead \(-1\) must be at least 0"),
        (["inference.timeout_s=0"], r"inference.timeout_s \(0.0\) must be above 0"),
    ],
)
def test_contradictory_settings_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        compose(given)


def test_an_interpreter_without_vllm_is_refused_immediately():
    import sys

    recipe = compose([f"inference.python={sys.executable}"])
    with pytest.raises(ConfigError, match=r"has no vLLM; .*`make vllm`.*vllm>=0"):
        check_inference(recipe, None)


@pytest.mark.parametrize("state", ["dead", "silent", "sick"])
def test_an_unreachable_server_is_refused_immediately(state, monkeypatch):
    """Not after the warm-up, and not after the deadline of an answer."""
    monkeypatch.setattr("ludic.inference.vllm.servers.HEALTH_TIMEOUT_S", 0.5)
    with StubVLLM() as alive, StubVLLM() as server:
        check_inference(compose([f"inference.url={alive.url}"]), None)
        if state == "dead":
            server.close()
        elif state == "silent":
            server.fail("/health", HANG)
        else:
            server.healthy = False
        recipe = compose([f"inference.url=[{alive.url},{server.url}]"])
        with pytest.raises(ConfigError, match=rf"inference.url \({server.url}\) does not answer.*`ludic serve`"):
            check_inference(recipe, None)


def test_the_error_of_a_model_that_a_cpu_server_cannot_run_says_what_to_set(monkeypatch):
    monkeypatch.setattr("ludic.inference.vllm.launch.check_has_vllm", lambda python: None)
    recipe = compose(["inference=vllm", "inference.device=cpu", "network.num_heads=8"])
    with pytest.raises(ConfigError, match=r"have 16 dimensions.*network.hidden_size"):
        check_inference(recipe, make_small_model(recipe.network))
    fitting = compose(["inference=vllm", "inference.device=cpu"])
    check_inference(fitting, make_small_model(fitting.network))  # 128 over 4 heads: the built-in recipes without changes


def test_an_evaluation_reports_how_it_samples_from_a_server():
    from ludic.cli.evaluate import resolve

    with pytest.raises(ConfigError, match="base_url=URL"):
        resolve(["sort", "inference=vllm"])


@pytest.mark.parametrize(
    ("temperature", "other", "expected"),
    [
        (1.0, "", LogprobConvention(processed=False, temperature=1.0)),
        (0.6, "stop=x", LogprobConvention(processed=True, temperature=0.6)),
        (1.0, "top_p=0.9", LogprobConvention(processed=False, temperature=1.0)),
        (0.6, "top_p=0.9", LogprobConvention(processed=False, temperature=1.0)),
        (0.6, "top_k=5", LogprobConvention(processed=False, temperature=1.0)),
        (0.6, "min_p=0.1", LogprobConvention(processed=False, temperature=1.0)),
        (0.6, "repetition_penalty=1.2", LogprobConvention(processed=False, temperature=1.0)),
        (0.0, "", LogprobConvention(processed=False, temperature=1.0)),
    ],
)
def test_sampler_and_trainer_use_the_same_distribution(temperature, other, expected):
    algorithm = "grpo" if temperature else "reinforce"  # equal answers give no advantage
    recipe = compose(
        [f"rollout.temperature={temperature}", "threads=1", f"algorithm={algorithm}", *([f"rollout.{other}"] if other else [])]
    )
    assert choose_logprob_convention(recipe.rollout) == expected
    assert RLRun.build(recipe, print).trainer_cfg.temperature == expected.temperature


KEPT = ["rollout.keep_candidates=true", "trainer.logits=full", "rollout.top_k=5"]


@pytest.mark.parametrize(
    "sampling",
    [
        [],
        ["rollout.temperature=0.6"],
        ["rollout.temperature=0.7", "rollout.top_p=0.9"],
        ["rollout.temperature=0.7", "rollout.top_p=0.9", *KEPT],
    ],
)
def test_an_in_process_run_measures_no_sampler_mismatch(tiny, tmp_path, sampling):
    train(*tiny, *sampling)
    found = summary(tmp_path / "run")
    assert found["mismatch"]["preflight"]["mean"] < 1e-5
    assert (found["mismatch"]["mean"] or 0.0) < 1e-4  # null if none of the few samples had a weight
    assert found["mismatch"]["lag"] == 0
    assert found["weight_sync"]["pushes"] == 3
    assert found["overlap"]["hidden"] < 0.5


def test_an_overlapped_run_trains_on_samples_one_version_old(tiny, tmp_path):
    train(*tiny, "inference.batches_ahead=1", "steps=4")
    found = summary(tmp_path / "run")
    assert found["steps"] == 4
    assert 0 < found["mismatch"]["lag"] <= 0.75  # the first batch is fresh; the staleness of the others depends on timing
    assert found["mismatch"]["preflight"]["mean"] < 1e-5


def test_a_stopped_overlapped_run_continues_with_the_following_prompts(tiny, tmp_path, monkeypatch):
    """Stopped after two of four steps, with a generated batch that is never trained, then
    resumed."""
    from ludic.training.batching.overlapped import OverlappedSource

    asked = []
    next_batch = OverlappedSource.next_batch

    async def noting(self):
        batch = await next_batch(self)
        if "problem_id" in batch.items[0].meta:
            asked.append(sorted({item.meta["problem_id"] for item in batch.items}))
            if len(asked) == 2:
                signal.raise_signal(signal.SIGINT)
        return batch

    monkeypatch.setattr(OverlappedSource, "next_batch", noting)
    arguments = [*tiny, "inference.batches_ahead=1", "steps=4", "rollout.log_every=0"]
    assert CliRunner().invoke(app, ["train", *arguments]).exit_code == 130
    train("--resume", str(tmp_path / "run"))
    whole = list(asked)
    asked.clear()
    monkeypatch.setattr(OverlappedSource, "next_batch", next_batch)
    assert len(whole) == 4

    from ludic.recipes.build import build_episodic_task
    from ludic.runs.rollouts import make_training_requests

    recipe = compose([argument for argument in arguments if not argument.startswith(("output", "name"))])
    prompts = make_training_requests(build_episodic_task(recipe), recipe.rollout, seed=recipe.seed)
    expected = [sorted({request.meta["problem_id"] for request in prompts()}) for _ in range(4)]
    assert whole == expected


async def test_the_startup_time_of_a_server_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM_FACTS", str(tmp_path / "facts.json"))
    (tmp_path / "config.json").write_text("{}")
    recipe = compose([f"inference.python={fake_vllm.install(tmp_path / 'venv')}"])
    timer, notes = PhaseTimer(), []
    async with _run_server(recipe, tmp_path, tmp_path / "log", notes.append, timer, False) as url:
        assert httpx2.get(f"{url}/health", timeout=30).status_code == 200
    assert timer.seconds("server_start") > 0
    assert len(notes) == 1


def test_the_startup_time_of_a_server_is_listed_separately():
    seconds = {"wall": 100.0, "set_up": 1.0, "warm_up": 2.0, "evaluate": 3.0}
    lines = [{"perf/rollout_s": 10.0}, {"perf/rollout_s": 20.0}]
    own, timed = ("set_up", "warm_up", "evaluate"), ("rollout",)
    assert sum_phases({**seconds, "server_start": 30.0}, lines, own=own, timed=timed) == {
        "set_up": 1.0,
        "warm_up": 2.0,
        "evaluate": 3.0,
        "server_start": 30.0,
        "rollout": 30.0,
        "other": 34.0,  # 100 - 1 - 2 - 3 - 30 - 10 - 20
    }
    assert "server_start" not in sum_phases(seconds, lines, own=own, timed=timed)


LINES = [
    {
        "mismatch/mean": 0.1, "mismatch/kl": 0.01, "mismatch/max": 0.5, "mismatch/ess": 0.9, "mismatch/tokens": 100.0,
        "train/policy_lag": 0.0, "perf/generation_s": 2.0, "perf/rollout_s": 2.0, "perf/publish_s": 0.2,
    },
    {
        "mismatch/mean": 0.2, "mismatch/kl": 0.03, "mismatch/max": 0.4, "mismatch/ess": 0.8, "mismatch/tokens": 300.0,
        "train/policy_lag": 1.0, "perf/generation_s": 2.0, "perf/rollout_s": 0.5, "perf/publish_s": 0.4,
    },
]  # fmt: skip


def test_the_summary_of_a_sampler_aggregates_its_steps():
    assert summarize_mismatch(LINES, {"mean": 1e-6}) == {
        "preflight": {"mean": 1e-6},
        "mean": pytest.approx(0.175),  # (0.1 * 100 + 0.2 * 300) / 400
        "kl": pytest.approx(0.025),
        "max": 0.5,
        "ess": 0.8,
        "lag": 0.5,
    }
    assert summarize_weight_sync(LINES) == {"pushes": 2, "mean_s": pytest.approx(0.3), "max_s": 0.4}
    assert summarize_overlap(LINES) == {"generation_s": 4.0, "waited_s": 2.5, "hidden": pytest.approx(0.375)}
    assert (summarize_mismatch([], None), summarize_weight_sync([]), summarize_overlap([])) == (None, None, None)


@pytest.mark.integration
def test_a_run_on_a_real_server_samples_from_the_trainers_weights(tmp_path: Path):
    """A server is started with the run's policy, receives the weights of every step, and is
    stopped."""
    python = os.environ.get("LUDIC_VLLM_PYTHON")
    if not python:
        pytest.skip("LUDIC_VLLM_PYTHON names no interpreter with vLLM; `make vllm` builds one")
    train(
        *(f"output={tmp_path}", "name=run", f"inference.python={python}", "inference.batches_ahead=1", "threads=1"),
        *("warmup.steps=60", "steps=4", "rollout.prompts=8", "rollout.group_size=8", "evaluation.prompts=8"),
        *("rollout.temperature=0.8", "trainer.lr=1.0e-3"),
    )
    found = summary(tmp_path / "run")
    assert found["mismatch"]["preflight"]["mean"] < 1e-4
    assert found["weight_sync"]["pushes"] == 4
    assert 0 < found["mismatch"]["lag"] <= 0.75
    assert found["overlap"]["generation_s"] > 0
    assert found["phases_s"]["server_start"] > found["phases_s"]["other"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    fresh = next(line for line in lines if line["phase"] == "reinforce" and line["step"] == 1)
    assert fresh.get("mismatch/mean", 0.0) < 1e-4  # absent if no sample of the first batch had a weight


@pytest.mark.parametrize("more", [[], ["inference=vllm", "trainer.sync_every_steps=2"], ["evaluation.on=nowhere"]])
def test_servers_answer_held_out_problems_only_where_they_have_the_weights(more):
    recipe = compose(["evaluation.on=servers", *more])
    with pytest.raises(ConfigError, match=r"evaluation.on \(\w+\) must be trainer, or servers \(inference=vllm"):
        check_inference(recipe, None)


async def test_a_server_that_somebody_else_started_gets_the_frozen_weights_once(tmp_path):
    """It may be of another checkpoint, and its tower would never be replaced."""
    (model, processor), (other, _) = make_tiny_vision("qwen2_vl"), make_tiny_vision("qwen2_vl", seed=1)
    folder = tmp_path / "run" / "model"
    save_policy(model, processor.tokenizer, folder)
    save_policy(other, processor.tokenizer, tmp_path / "server")
    set_trained_parts(model, "frozen")
    with StubPolicyServer(tmp_path / "server") as server:
        server.on_v1_models = lambda *_: {"data": [{"id": "tiny", "max_model_len": 512}]}
        recipe = compose([f"inference.url={server.url}", "inference.weights=disk"])
        async with open_sampler(recipe, model, processor.tokenizer, folder, log=tmp_path / "log", note=print) as sampler:
            assert same(server.served, load_file(folder / "model.safetensors"))
            with torch.no_grad():
                model.lm_head.weight.add_(1.0)
            sampler.publisher.publish(published_weights(model), version=1)
        assert torch.equal(server.served["lm_head.weight"], model.lm_head.weight)
        pushed = load_file(tmp_path / "run" / "pushed" / "version_1" / "model.safetensors")
    assert "lm_head.weight" in pushed
    assert not any(name.startswith("visual.") for name in pushed)
