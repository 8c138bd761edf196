"""What a run reports while it runs: its metrics file, the terminal, and trackers."""

import io
import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.errors import ConfigError
from ludic.recipes.compose import compose, config_hash
from ludic.recipes.epochs_schema import compose_sft
from ludic.runs import loggers
from ludic.runs.directory import RunDirectory
from ludic.runs.loggers import Screen, parse_trackers, run_logger


def ludic(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, float]]]:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# --- metrics file and terminal


def test_evaluations_have_separate_lines_in_the_file_and_on_the_terminal(tiny: list[str], tmp_path: Path) -> None:
    shown = ludic("train", *tiny, "log_every=3", "trainer.eval_every_n_steps=2")
    lines = [line for line in lines_of(tmp_path / "run") if line["phase"] == "reinforce"]
    assert [(line["step"], "train/loss" in line, "eval/sampled_reward" in line) for line in lines] == [
        (1, True, False),
        (2, True, False),
        (2, False, True),
        (3, True, False),
    ]
    [measured] = [line for line in shown.splitlines() if line.startswith("[reinforce] step=2")]
    assert f"eval/sampled_reward={lines[2]['eval/sampled_reward']:.3f}" in measured
    assert "[reinforce] step=2\n" not in shown


def test_lines_have_the_commit_and_other_names_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAXENT_GIT_SHA", "abc1234")
    console, directory = Console(file=io.StringIO()), RunDirectory(tmp_path)
    recipe = compose(["report_header=true", "report_aliases=true"])
    with run_logger(
        recipe, directory, Screen(console, every=1), "reinforce", keys=["train/lr"], spark_key="lr", last_step=1
    ) as logger:
        logger.log(1, {"train/lr": 0.5})
    header = {"run/git_sha": "abc1234", "run/recipe_path": str(tmp_path / "config.yaml")}
    assert lines_of(tmp_path) == [{"step": 1, "phase": "reinforce", **header, "train/lr": 0.5, "train/learning_rate": 0.5}]
    assert config_hash(recipe) == config_hash(compose([]))


def test_a_tracker_that_cannot_end_its_run_does_not_end_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone:
        def start(self) -> None: ...

        def log(self, step: int, stats: dict[str, float]) -> None: ...

        def close(self) -> None:
            raise ConnectionError("the server is away")

    monkeypatch.setitem(loggers.TRACKERS, "mlflow", lambda run: Gone())
    monkeypatch.setattr(loggers, "_describe_place", lambda tracker, run: "nowhere")
    recipe, directory = compose(["report_to=mlflow"]), RunDirectory(tmp_path)
    screen = Screen(Console(file=io.StringIO()), every=1)
    with run_logger(recipe, directory, screen, "reinforce", keys=["train/lr"], spark_key="lr", last_step=1) as logger:
        logger.log(1, {"train/lr": 0.5})
    assert "mlflow did not end its run" in caplog.text
    assert "the server is away" in caplog.text


def test_the_dashboard_shows_training_beside_the_first_and_the_latest_evaluation() -> None:
    console = Console(force_terminal=True, width=140, color_system=None, record=True)
    screen = Screen(console, every=10)
    with screen.logger("reinforce", keys=["train/loss"], spark_key="loss", last_step=5) as logger:
        screen.show_rates({"eval/step": 0.0, "eval/sampled_reward": 0.25})
        logger.log(1, {"train/loss": 0.5, "perf/step_s": 1.5})
        logger.log(2, {"eval/step": 2.0, "eval/sampled_reward": 0.75})
        pictures = console.export_text(clear=False).split("╭─")
    assert any("eval · step 0" in part for part in pictures)
    last = console.export_text().rpartition("eval · step 2")
    assert "0.5000" in last[2]
    assert "0.7500" in last[2]
    assert "nothing yet" not in last[2]
    screen.show_rates({"eval/sampled_reward": 1.0})  # no dashboard is open


# --- trackers


def test_tensorboard_has_the_metrics_of_the_file_by_phase(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = ludic("train", *tiny, "report_to=tensorboard", "trainer.eval_every_n_steps=3")
    assert f"Reporting to tensorboard: tensorboard --logdir {tmp_path / 'run' / 'tensorboard'}" in shown
    for phase in ("warm_up", "reinforce"):
        lines = [line for line in lines_of(tmp_path / "run") if line["phase"] == phase]
        found = scalars_of(tmp_path / "run" / "tensorboard" / phase, monkeypatch)
        losses = [(line["step"], pytest.approx(line["train/loss"], rel=1e-6)) for line in lines if "train/loss" in line]
        assert found["train/loss"] == losses
    assert [step for step, _ in found["eval/sampled_reward"]] == [3]


class OwnWandb(types.ModuleType):
    """A fake of the used part of wandb."""

    run = None

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)  # other libraries look for it when they are imported
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.ended = 0

    def init(self, **settings: Any) -> Any:
        self.begun.append(settings)
        return types.SimpleNamespace(log=self.log, finish=self.finish)

    def log(self, stats: dict[str, Any], step: int) -> None:
        self.logged.append((step, stats))

    def finish(self) -> None:
        self.ended += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> OwnWandb:
    module = OwnWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_tracker_has_one_run_per_phase_named_after_the_folder(tiny: list[str], tmp_path: Path, wandb: OwnWandb) -> None:
    ludic("train", *tiny, "report_to=[wandb,tensorboard]", "warmup.steps=1", "steps=2")
    assert [run["name"] for run in wandb.begun] == ["run-warm-up", "run"]
    assert {run["group"] for run in wandb.begun} == {"run"}
    assert wandb.begun[0]["id"] != wandb.begun[1]["id"]
    assert wandb.begun[1]["config"]["algorithm"] == compose(tiny).algorithm
    assert [step for step, _ in wandb.logged] == [1, 1, 2]
    assert wandb.ended == 2
    assert (tmp_path / "run" / "tensorboard" / "reinforce").is_dir()


@pytest.mark.integration
def test_wandb_gets_the_names_that_the_recipe_gives(tiny: list[str], tmp_path: Path, wandb: OwnWandb) -> None:
    ludic("train", *tiny, "report_to=wandb", "report_args={project:maths,entity:lab,name:mine}", "steps=1")
    run = wandb.begun[-1]
    assert (run["project"], run["entity"], run["name"], run["group"]) == ("maths", "lab", "mine", "run")


def test_only_a_resumed_run_continues_its_tracker_run(tiny: list[str], tmp_path: Path, wandb: OwnWandb) -> None:
    from ludic.runs.directory import RunDirectory
    from ludic.runs.loggers import run_logger

    recipe = compose([*tiny, "report_to=wandb"])
    screen = Screen(Console(file=io.StringIO()), every=1)
    for name in ("one", "one", "two"):
        directory = RunDirectory(tmp_path / name)
        directory.path.mkdir(exist_ok=True)
        with run_logger(recipe, directory, screen, "reinforce", keys=[], spark_key="loss", last_step=1):
            pass
    first, resumed, other = (run["id"] for run in wandb.begun)
    assert first == resumed != other
    assert wandb.begun[1]["resume"] == "allow"


def test_sft_and_reward_models_report_to_trackers(tmp_path: Path, wandb: OwnWandb) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(8)))
    small = [
        "threads=1",
        "network.hidden_size=16",
        "network.num_heads=2",
        "network.num_kv_heads=1",
        "network.intermediate_size=16",
    ]
    common = [*small, f"output={tmp_path}", "steps=2", "report_to=wandb"]
    ludic("sft", *common, f"data={data}", "name=a", "batch_size=2", "heldout=0.0")
    ludic("train-rm", *common, "pairs=20", "name=b", "batch_size=2")
    assert [run["name"] for run in wandb.begun] == ["a", "b"]
    assert [step for step, stats in wandb.logged if "train/loss" in stats] == [1, 2, 1, 2]


def test_an_unknown_tracker_is_an_error_with_a_suggestion_and_leaves_no_folder(tiny: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", *tiny, "report_to=tensorbord"])
    assert result.exit_code == 2
    assert "did you mean tensorboard?" in result.output
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_an_error_before_the_folder_is_created(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    result = CliRunner().invoke(app, ["train", *tiny, "report_to=trackio"])
    assert result.exit_code == 2
    assert "ludic-rl[trackio]" in result.output
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_cannot_start_ends_the_run_with_one_line(tiny: list[str], wandb: OwnWandb) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError("no API key")

    wandb.init = refuse  # type: ignore[method-assign]
    result = CliRunner().invoke(app, ["train", *tiny, "report_to=wandb"])
    assert result.exit_code == 2
    assert "wandb cannot start (PermissionError: no API key)" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("given", "names"), [(None, []), ("none", []), ("wandb", ["wandb"]), (["trackio", "wandb", "trackio"], ["trackio", "wandb"])]
)
def test_trackers_can_be_a_name_a_list_or_none(given: Any, names: list[str]) -> None:
    assert parse_trackers(given) == names


def test_trackers_are_not_part_of_the_hash_of_a_run() -> None:
    assert config_hash(compose(["report_to=wandb"])) == config_hash(compose([]))
    with pytest.raises(ConfigError, match=r"report_to \('clearml'\) .*mlflow, tensorboard, trackio, wandb, none"):
        parse_trackers(["clearml"])


def test_log_is_the_short_name() -> None:
    assert compose(["log=[wandb,mlflow]"]).report_to == ["wandb", "mlflow"]
    assert compose_sft(["data=rows.jsonl", "log=tensorboard"]).report_to == "tensorboard"


def test_every_tracker_and_the_terminal_get_what_tells_how_a_run_goes(
    tiny: list[str], tmp_path: Path, wandb: OwnWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    shown = ludic("train", *tiny, "log=[wandb,tensorboard,mlflow]", "warmup.steps=1", "log_every=1", "steps=2")
    lengths = [f"train/{which}_completion_length" for which in ("avg", "min", "max")]
    signal = ["train/reward_std", "train/frac_reward_zero_std", "train/entropy"]
    expected = {*signal, *lengths, "perf/tokens_per_s", "perf/time_left_s"}
    [*_, last] = [line for line in lines_of(tmp_path / "run") if line["phase"] == "reinforce" and "train/loss" in line]
    assert expected <= last.keys()
    assert last["perf/tokens_per_s"] == pytest.approx(
        (last["perf/real_tokens"] + last["perf/shared_tokens"]) / last["perf/step_s"]
    )
    assert last["perf/time_left_s"] == 0.0
    assert expected <= wandb.logged[-1][1].keys()
    assert expected <= scalars_of(tmp_path / "run" / "tensorboard" / "reinforce", monkeypatch).keys()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    found = {run.info.run_name: run for run in client.search_runs([client.get_experiment_by_name("Ludic").experiment_id])}
    assert set(found) == {"run-warm-up", "run"}
    assert expected <= found["run"].data.metrics.keys()
    assert found["run"].data.params["rollout.group_size"] == "4"
    assert all(f"{key}=" in shown for key in expected)
    assert f"mlflow ui --backend-store-uri sqlite:///{tmp_path / 'mlflow.db'}" in shown.replace("\n", "")
