"""`inference.colocate`: runs whose server sleeps while the trainer computes. The server is a stub
that holds the policy and samples from it (`policy_vllm`)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fake_vllm
import policy_vllm
import pytest
from commands import NETWORK, metrics_of, refused, same_weights

from ludic.errors import ConfigError
from ludic.recipes.compose import compose
from ludic.runs.memory_estimate import MemoryEstimator, Settings

COLOCATED = ["inference=vllm", "inference.colocate=true"]
SUPPORT = Path(__file__).parents[1] / "support"
STEPS = 4


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["inference.url=http://127.0.0.1:8000"], "inference.url"),
        (["servers=1"], "place.servers"),
        (["actors=1"], "place.actors"),
        (["ranks=2"], "place.trainers"),
        (["inference.batches_ahead=1"], "inference.batches_ahead"),
        (["rollout.over_sampling_factor=1.5"], "rollout.over_sampling_factor"),
        (["rollout.group_filter=nonzero_std"], "rollout.group_filter"),
        (["info_seed.num_seeds=2"], "info_seed.num_seeds"),
        (["reward_model=some/folder"], "reward_model"),
        (["inference.weights=ludic_nccl"], "inference.weights=ludic_nccl"),
    ],
)
def test_what_needs_the_device_in_the_turn_of_the_other_is_refused_in_one_line(settings: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=r"inference.colocate .True. does not go together") as raised:
        compose([*COLOCATED, *settings])
    assert f"with {named};" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_it_needs_a_server() -> None:
    with pytest.raises(ConfigError, match=r"inference.colocate .True. needs inference.kind=vllm"):
        compose(["inference.colocate=true"])


def test_an_evaluation_by_the_trainer_in_the_servers_turn_is_refused(tmp_path: Path) -> None:
    python = fake_vllm.install(tmp_path / "venv", cpu=False)
    where = [f"output={tmp_path}", f"inference.python={python}", "inference.colocate=true"]
    assert "set evaluation.on=servers" in refused("train", *where, "trainer.eval_every_n_steps=2")


def test_the_trainer_leaves_the_device_only_to_a_server(tmp_path: Path) -> None:
    assert "trainer.offload needs inference.colocate" in refused("train", f"output={tmp_path}", "trainer.offload=true")


def test_weights_are_not_counted_while_the_server_samples() -> None:
    for settings, samples in ((COLOCATED, 0), ([*COLOCATED, "trainer.offload=false"], 1)):
        recipe = compose(settings)
        estimate = MemoryEstimator(recipe).estimate(Settings.of(recipe))
        assert (estimate.sampling > 0) == bool(samples)
        assert estimate.training > 0


def settings_of(folder: Path, *more: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    venv = folder / "venv"
    python = venv / "bin" / "python" if venv.exists() else fake_vllm.install(venv, cpu=False, script=policy_vllm.__file__)
    rows = folder / "rows.jsonl"
    problems = [{"prompt": f"{n * 7919 % 100000}>", "completion": f"{n:03d}"} for n in range(30)]
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in problems))
    return [
        *(f"data={rows}", "reward=byte_rewards:mean_id", "task.args.max_new_tokens=4", "task.args.num_heldout=3"),
        *("threads=1", "warmup.steps=2", "warmup.batch_size=4", f"steps={STEPS}", "rollout.prompts=4", "rollout.group_size=4"),
        *("evaluation.prompts=3", "evaluation.samples_per_prompt=2", *NETWORK, "checkpoint.every_n_steps=1"),
        *("trainer.lr=3e-3", f"inference.python={python}", "trainer.model_device=cpu", f"output={folder}", "name=run", *more),
    ]


class Played:
    """`ludic train` as a process, in a folder, with the calls that its servers got."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self._calls = folder, folder / "run", folder / "calls"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "CALLS": str(self._calls)}
        command = [sys.executable, "-m", "ludic.cli", "train", *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def play(self, *arguments: str) -> None:
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output

    @property
    def calls(self) -> list[tuple[str, Any]]:
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [(path, details) for path, details in map(json.loads, lines)]

    def turns(self) -> list[str]:
        """A letter for each call: S it sleeps, W and K its weights and its cache wake, L it loads
        weights."""
        letters = {"/sleep": "S", "/finish_weight_update": "L", "start": ""}
        return [letters.get(path) or {"weights": "W", "kv_cache": "K"}[details["tags"][0]] for path, details in self.calls[1:]]

    def losses(self) -> list[tuple[Any, ...]]:
        lines = [line for line in metrics_of(self.run) if "train/loss" in line]
        return [(line["phase"], line["step"], line["train/loss"], line["train/grad_norm"]) for line in lines]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The run whose server never sleeps."""
    played = Played(tmp_path_factory.mktemp("apart"))
    played.play(*settings_of(played.folder))
    assert "S" not in played.turns()
    assert len({loss for *_, loss in played.losses()}) > STEPS  # it learns, so that a difference would show
    return played


@pytest.mark.integration
@pytest.mark.parametrize(("weights", "level"), [("gloo", "2"), ("disk", "2")])
def test_a_run_that_takes_turns_with_its_server_is_the_run_that_does_not(
    apart: Played, tmp_path: Path, weights: str, level: str
) -> None:
    played = Played(tmp_path / weights)
    measured = ["evaluation.on=servers", "trainer.eval_every_n_steps=2"] if weights == "disk" else []
    played.play(*settings_of(played.folder, f"inference.weights={weights}", "inference.colocate=true", *measured))
    arguments = played.calls[0][1]
    assert "--enable-sleep-mode" in arguments
    assert arguments[arguments.index("--gpu-memory-utilization") + 1] == "0.9"
    after = "LK" if weights == "gloo" else "LK" + "L"  # awake, it gets the weights of the last step once more to be measured
    assert "".join(played.turns()) == "SWLK" + "SWLK" * (STEPS - 1) + "SW" + after
    assert {details["level"][0] for path, details in played.calls if path == "/sleep"} == {level}
    assert same_weights(played.run, apart.run)
    assert played.losses() == apart.losses()


@pytest.mark.integration
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_stopped_while_its_server_sleeps_goes_on_with_a_new_one(
    apart: Played, tmp_path: Path, stop: signal.Signals
) -> None:
    played = Played(tmp_path / "stopped")
    process = played.start(*settings_of(played.folder, "inference.colocate=true"))
    deadline = time.monotonic() + 200
    while played.turns().count("S") < 3:  # before the first push, and in steps 1 and 2
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(stop)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0, output
    assert "Traceback" not in output
    played.play("--resume", str(played.run))
    assert len([path for path, _ in played.calls if path == "start"]) == 2
    assert same_weights(played.run, apart.run)
    assert played.losses() == apart.losses()
