"""`ludic train` and `ludic rollout` with a real vLLM server: pushed weights and sampled tokens are
those of the run."""

import json

import pytest
import torch
from byte_rewards import mean_id
from real_vllm import vllm_or_skip
from served_weights import CHANGED, CLOSE, logprob_differences, max_difference, served_version
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.distributed import create_vllm_publisher
from ludic.inference.vllm.endpoints import VllmEndpoints
from ludic.models.loading import load_model
from ludic.training.checkpoint import CheckpointConfig, CheckpointManager

pytestmark = pytest.mark.integration
assert mean_id  # the runs name these functions as their reward
RUN = ["threads=1", "warmup.steps=20", "steps=3", "evaluation.prompts=8", "rollout.prompts=4", "rollout.group_size=8"]
REWARD = ["reward=byte_rewards:mean_id", "task.args.max_new_tokens=16", "task.args.num_heldout=8"]


def ludic(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(folder):
    path = folder / "rows.jsonl"
    lines = [json.dumps({"prompt": f"{n * 7919 % 100000}>", "completion": f"{n:03d}"}) for n in range(30)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


LORA = ["lora.rank=8", "lora.publish=merged", "trainer.lr=0.02"]


@pytest.mark.parametrize("settings", [[], ["inference.weights=disk"], LORA, [*LORA, "warmup.steps=0"]])
def test_every_step_of_a_run_is_pushed_to_a_running_server(vllm_server_to_change, tmp_path, settings):
    """At the end the server samples from the run's last weights with merged adapters, and it keeps
    running."""
    server = vllm_server_to_change
    where = [f"inference.url={server.url}", f"output={tmp_path}", "name=run", "trainer.lr=1.0e-3"]
    ludic("train", f"model={server.folder}", f"data={rows(tmp_path)}", *RUN, *REWARD, *where, *settings)
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["weight_sync"]["pushes"] == 3
    assert found["mismatch"]["preflight"]["mean"] < CLOSE
    assert found["mismatch"]["mean"] < CLOSE
    assert "server_start" not in found["phases_s"]
    assert served_version(server) == "3"
    assert max_difference(load_model(str(tmp_path / "run" / "model"), "float32"), server) < CLOSE
    assert max_difference(server.model, server) > CHANGED
    assert (tmp_path / "run" / "adapter").exists() == ("lora.rank=8" in settings)
    assert (tmp_path / "run" / "pushed" / "version_3").exists() == ("inference.weights=disk" in settings)


def test_every_step_of_a_run_whose_server_sleeps_in_between_is_sampled_from_the_weights_of_its_trainer(tmp_path):
    """On a CPU vLLM's sleep frees nothing; its order is the one on a GPU."""
    vllm_or_skip()
    where = ["inference=vllm", "inference.colocate=true", f"data={rows(tmp_path)}", f"output={tmp_path}", "name=run"]
    ludic("train", "network.hidden_size=64", "network.num_heads=2", *RUN, *REWARD, *where, "trainer.lr=1.0e-3")
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["weight_sync"]["pushes"] == 3
    assert found["mismatch"]["preflight"]["mean"] < CLOSE
    assert found["mismatch"]["mean"] < CLOSE
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["train/grad_norm"] > 0 for line in lines if line["phase"] == "reinforce")
    log = (tmp_path / "run" / "server.log").read_text()
    assert log.count("wake up the engine with tags: ['weights']") == 4  # before the first step, and after each
    assert log.count("wake up the engine with tags: ['kv_cache']") == 4


def test_adapters_of_every_step_are_pushed_to_a_running_server(vllm_server_to_change, tmp_path):
    """Nothing of the run stays at the server, which has its base model as before. A server with
    pushed weights does not have that model, and gets merged weights."""
    server = vllm_server_to_change
    where = [f"inference.url={server.url}", f"output={tmp_path}", "trainer.log_every=1"]
    command = [
        "train",
        f"model={server.folder}",
        f"data={rows(tmp_path)}",
        *RUN,
        *REWARD,
        *where,
        "lora.rank=8",
        "trainer.lr=0.02",
    ]
    before = served_version(server)
    ludic(*command, "name=run", "lora.publish=adapter")
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["weight_sync"]["pushes"] == 3
    assert found["mismatch"]["preflight"]["mean"] < CLOSE
    assert found["mismatch"]["mean"] < CLOSE
    assert (served_version(server), found["mismatch"]["lag"]) == (before, 0.0)
    assert max_difference(server.model, server) < CLOSE
    assert not any("@" in name for name in VllmEndpoints(server.url).models())
    create_vllm_publisher(server.url).publish(dict(server.model.named_parameters()), version=9)
    told = ludic(*command, "name=merged", "steps=1")
    assert "Merged weights are pushed: " in told
    assert max_difference(load_model(str(tmp_path / "merged" / "model"), "float32"), server) < CLOSE


@pytest.mark.parametrize("tower", ["trained", "frozen"])
def test_a_run_with_images_samples_from_a_server_that_reads_what_the_trainer_reads(tower, tmp_path):
    """Each step is of other weights: features that the server kept of the old tower would show."""
    vllm_or_skip()
    settings = ["inference=vllm", f"images.tower={tower}", "seed=1", "warmup.steps=55", "steps=4", "trainer.log_every=1"]
    ludic(
        "train", "shapes", f"output={tmp_path}", "name=run", "threads=1", "rollout.prompts=8", "evaluation.prompts=8", *settings
    )
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["weight_sync"]["pushes"] == 4
    assert found["mismatch"]["preflight"]["mean"] < CLOSE
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "mismatch/max" in line]
    assert len(steps) == 4
    assert max(line["mismatch/max"] for line in steps) < CLOSE
    assert all(line["images/distinct"] > 0 for line in steps)


def rollouts(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_rollouts(path, model):
    """Sixteen answers whose log-probabilities are the model's."""
    written = rollouts(path)
    assert len(written) == 16
    for rollout in written:
        (step,) = rollout["steps"]
        trace = step["trace"]
        far = logprob_differences(model, trace["completion_token_ids"], trace["completion_logprobs"], trace["prompt_token_ids"])
        assert far.max().item() < CLOSE
    return written


PLAY = ["rollout.prompts=4", "rollout.group_size=4", "--episodes", "16"]


def test_rollouts_use_the_weights_of_a_running_server(vllm_server, tmp_path):
    out, given = tmp_path / "out.jsonl", served_version(vllm_server)
    where = [f"inference.url={vllm_server.url}", f"model={vllm_server.folder}", f"data={rows(tmp_path)}"]
    ludic("rollout", *REWARD, *where, *PLAY, "--out", out)
    check_rollouts(out, vllm_server.model)
    assert served_version(vllm_server) == given


def test_rollouts_start_a_server_for_the_named_model_which_may_be_a_checkpoint(vllm_server, tmp_path):
    """vLLM reads the folder of a step as it is, with the state of an optimizer in it."""
    vllm_or_skip()
    out = tmp_path / "out.jsonl"
    manager = CheckpointManager(CheckpointConfig(tmp_path / "checkpoints"), tokenizer=vllm_server.tokenizer)
    optimizer = torch.optim.AdamW(vllm_server.model.parameters(), lr=0.0, weight_decay=0.0)
    sum(parameter.sum() * 0.0 for parameter in vllm_server.model.parameters()).backward()
    optimizer.step()
    vllm_server.model.zero_grad()
    checkpoint = manager.save(vllm_server.model, optimizer=optimizer, step=3)
    assert (checkpoint / "optimizer.safetensors").exists()
    where = ["inference=vllm", f"model={checkpoint}", f"data={rows(tmp_path)}"]
    ludic("rollout", *REWARD, *where, *PLAY, "--out", out)
    written = check_rollouts(out, vllm_server.model)
    assert {rollout["meta"]["policy_version"] for rollout in written} == {0}
    assert "Application shutdown complete" in (tmp_path / "out.jsonl.server.log").read_text()
