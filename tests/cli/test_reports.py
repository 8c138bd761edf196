"""`ludic runs` and `ludic view` on the command line."""

import json
import os
import re

import pytest
from commands import ludic
from run_folders import make_run
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.cli.runs import MAX_RUNS


@pytest.fixture
def folder(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", algorithm="cispo", lr=0.2, phase="reinforce", failed="OSError: no space\nmore")
    return tmp_path


def test_runs_are_a_table_with_the_settings_that_differ(folder):
    assert ludic("runs", str(folder)).splitlines() == [
        "RUN  STATUS    STEPS  ALGORITHM  HELD OUT        BEFORE  AFTER                   TIME",
        "a    finished  4      grpo       sampled_reward  0.250   0.750 (0.700 to 0.800)  62 s",
        "b    failed    4      cispo      sampled_reward  0.250                           62 s",
        "b failed: OSError: no space",
        "",
        "Settings that differ",
        "RUN  algorithm  trainer.lr",
        "a    grpo       0.1",
        "b    cispo      0.2",
    ]


def test_runs_that_differ_by_their_seed_alone_have_a_mean_and_a_spread(tmp_path):
    for seed, after in enumerate((0.5, 0.7, 0.9)):
        run = make_run(tmp_path / f"s{seed}")
        config = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(re.sub(r"^seed:.*\n", "", config, flags=re.MULTILINE) + f"seed: {seed}\n")
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps({**summary, "after": {**summary["after"], "sampled_reward": after}}))
    make_run(tmp_path / "other", lr=0.2)
    lines = ludic("runs", str(tmp_path)).splitlines()
    table = lines[lines.index("Over seeds: mean and standard deviation") + 1 :][:2]
    assert [line.split("  ") for line in (re.sub(" {2,}", "  ", line) for line in table)] == [
        ["RUNS", "HELD OUT", "BEFORE", "AFTER"],
        ["s0, s1, s2", "sampled_reward", "0.250 ± 0.000", "0.700 ± 0.200"],
    ]


def test_json_has_every_run_once(folder):
    found = json.loads(ludic("runs", str(folder), str(folder / "a"), "--json"))
    assert [run["run"] for run in found] == [str(folder / "a"), str(folder / "b")]
    assert found[1]["settings"] == {"algorithm": "cispo", "trainer.lr": 0.2}
    assert (found[0]["status"], found[0]["after"], found[0]["wall_s"]) == ("finished", {"sampled_reward": 0.75}, 61.5)
    assert found[1]["failed"] == "OSError: no space\nmore"


def test_json_is_read_by_any_reader_if_a_run_has_diverged(tmp_path):
    for name, value in (("a", ".inf"), ("b", ".nan")):
        run = make_run(tmp_path / name, lr=value)
        (run / "summary.json").write_text('{"after": {"loss": NaN}}')
    found = json.loads(ludic("runs", str(tmp_path), "--json"), parse_constant=pytest.fail)
    assert [(run["settings"], run["after"]) for run in found] == [
        ({"trainer.lr": "inf"}, {"loss": None}),
        ({"trainer.lr": "nan"}, {"loss": None}),
    ]


def test_a_damaged_run_does_not_hide_the_others(folder):
    (folder / "b" / "progress.json").write_text("{")
    result = CliRunner().invoke(app, ["runs", str(folder)])
    assert result.exit_code == 1
    assert "\na    finished" in result.stdout
    assert "progress.json is not JSON" in result.stderr


def test_a_folder_without_runs_says_how_to_make_one(tmp_path):
    assert "There are no runs in" in ludic("runs", str(tmp_path))


def test_a_page_is_written_beside_the_run_or_where_it_is_wanted(folder, monkeypatch):
    assert str(folder / "a" / "report.html") in ludic("view", str(folder / "a"))
    assert (folder / "a" / "report.html").read_text().startswith("<!doctype html>")
    monkeypatch.chdir(folder)
    assert "report.html: 2 runs" in ludic("view", str(folder))
    assert (folder / "report.html").is_file()
    ludic("view", str(folder / "a"), "-o", str(folder / "new" / "page.html"))
    assert (folder / "new" / "page.html").is_file()


def test_a_page_of_nothing_or_too_much_is_refused(folder):
    for number in range(MAX_RUNS):
        make_run(folder / "many" / f"run{number}")
    for wrong, said in (
        ([str(folder / "nothing")], "there is no folder"),
        ([str(folder / "many"), str(folder / "a")], "25 runs are too many"),
        ([str(folder / "a"), "-o", str(folder)], "is a folder; name a file"),
    ):
        result = CliRunner().invoke(app, ["view", *wrong])
        assert result.exit_code == 2, result.output
        assert said in " ".join(result.stderr.split())


def test_without_a_run_the_newest_is_shown(folder, tmp_path, monkeypatch):
    """`folder` is a folder of runs; the default one is `runs` here."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    result = CliRunner().invoke(app, ["view"])
    assert (result.exit_code, "there are no runs in runs" in " ".join(result.stderr.split())) == (2, True)
    for number, name in enumerate(("new", "old", "older")):
        config = make_run(tmp_path / "work" / "runs" / name) / "config.yaml"
        os.utime(config, (1e9 - number, 1e9 - number))
    assert "runs/new/report.html: 1 run" in ludic("view")


def test_what_a_run_holds_cannot_change_the_terminal(tmp_path):
    run = make_run(tmp_path / "runs" / "a\x1b[2J", phase="reinforce", failed="KeyError: \x1b]0;title\x07\nmore")
    make_run(tmp_path / "runs" / "b", lr='"\\e[31m"')
    (run.parent / "c\x1b[1m").mkdir()
    shown = CliRunner().invoke(app, ["runs", str(tmp_path / "runs")])
    assert not {"\x1b", "\x07"} & set(shown.output)
    assert "a\\x1b[2J failed: KeyError: \\x1b]0;title\\x07\n" in shown.output
    assert "b     " in shown.output
    (run / "progress.json").write_text("{")
    damaged = CliRunner().invoke(app, ["runs", str(tmp_path / "runs")])
    assert damaged.exit_code == 1
    assert "\x1b[2J" not in damaged.output
    refused = CliRunner().invoke(app, ["view", str(tmp_path / "no\x1b[2J")])
    assert "no\\x1b[2J" in refused.output
