"""The commit and the recipe of a run."""

import subprocess

import pytest

from ludic.runs.loggers import run_header


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def test_the_commit_and_whether_files_were_changed_since(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "one")
    sha = git(tmp_path, "rev-parse", "--short", "HEAD")
    (tmp_path / "new").write_text("x")  # git does not know it
    expected = {"run/git_sha": sha, "run/git_dirty": False, "run/recipe_path": "a.yaml"}
    assert run_header("a.yaml", folder=tmp_path, environment={}) == expected
    (tmp_path / "a").write_text("2")
    assert run_header("a.yaml", folder=tmp_path, environment={}) == {**expected, "run/git_dirty": True}


def test_outside_a_repository_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run_header(folder=tmp_path, environment={}) == {"run/git_sha": "unknown", "run/recipe_path": "unknown"}


@pytest.mark.parametrize(
    ("path", "environment", "found"),
    [
        ("own.yaml", {"GRPO_RECIPE_USED": "used.yaml"}, "own.yaml"),
        (None, {"GRPO_RECIPE_USED": "used.yaml", "GRPO_RECIPE": "asked.yaml"}, "used.yaml"),
        (None, {"GRPO_RECIPE": "asked.yaml"}, "asked.yaml"),
    ],
)
def test_the_recipe_is_the_argument_or_in_the_environment(path, environment, found):
    header = run_header(path, environment={**environment, "MAXENT_GIT_SHA": "abc"})
    assert header == {"run/git_sha": "abc", "run/recipe_path": found}
