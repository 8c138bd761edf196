"""Where the code and the recipe of a run come from: three entries in its metrics."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

UNKNOWN = "unknown"
GIT_S = 10.0
"""The deadline of a question to git."""
_SHA, _DIRTY, _RECIPE = "run/git_sha", "run/git_dirty", "run/recipe_path"


def run_header(
    recipe_path: str | Path | None = None, *, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, str | bool]:
    """`run/git_sha`, `run/git_dirty` and `run/recipe_path`.

    The commit is `MAXENT_GIT_SHA` of `environment` (this process's if None), else the commit of the
    repository of `folder` (the current one if None); `git_dirty` says whether files that git knows
    were changed since, and is only there if the commit comes from git. The recipe is `recipe_path`,
    else `GRPO_RECIPE_USED` or `GRPO_RECIPE`. An entry that is not known is `unknown`.
    """
    env = os.environ if environment is None else environment
    where, given = folder or Path.cwd(), env.get("MAXENT_GIT_SHA")
    commit = given or _ask_git(where, "rev-parse", "--short", "HEAD")
    header: dict[str, str | bool] = {_SHA: commit or UNKNOWN}
    changed = None if given or not commit else _ask_git(where, "status", "--porcelain", "--untracked-files=no")
    if changed is not None:
        header[_DIRTY] = bool(changed)
    header[_RECIPE] = str(recipe_path or env.get("GRPO_RECIPE_USED") or env.get("GRPO_RECIPE") or UNKNOWN)
    return header


def _ask_git(folder: Path, *arguments: str) -> str | None:
    """None if git is not there, or not a repository."""
    command = ["git", "-C", str(folder), "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
