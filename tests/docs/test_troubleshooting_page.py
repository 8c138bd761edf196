"""docs/troubleshooting.md: its settings and metrics exist, and its messages are raised."""

import re
from pathlib import Path

import pytest

from ludic.errors import ConfigError
from ludic.recipes.build import build_algorithm
from ludic.recipes.compose import compose
from ludic.training.reducers import default_reducers

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
KEYS = set(re.findall(r"`((?:train|perf)/\w+)`", PAGE))
SETTINGS = set(re.findall(r"`((?:task|trainer|rollout|evaluation|inference|lora)\.[\w.]+)(?:=[^`]*)?`", PAGE))
ASSIGNED = set(re.findall(r"`((?:[a-z_]+\.)*[a-z_]+=[^`,]*[^`=,])`", PAGE))


def test_every_metric_is_on_the_metrics_page():
    metrics = (DOCS / "metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:train/|perf/)?([a-z_0-9]+)`", metrics))
    assert len(KEYS) >= 6
    assert {key.partition("/")[2] for key in KEYS} <= named | set(default_reducers())


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_every_setting_exists(setting):
    section, _, name = setting.partition(".")
    if section == "task":
        assert name.partition(".")[0] == "args"
    else:
        assert name in vars(getattr(compose(), section))


@pytest.mark.parametrize("assignment", sorted(ASSIGNED))
def test_every_assignment_composes(assignment):
    with_it = ["lora.rank=16"] if assignment.startswith("quantization=") else []  # as the page says
    compose([assignment, *with_it])


def test_greedy_groups_are_refused_in_these_words():
    with pytest.raises(ConfigError, match=r"^rollout\.temperature \(0\) gives equal answers"):
        build_algorithm(compose(["rollout.temperature=0"]))
    assert "`rollout.temperature (0) gives equal answers`" in PAGE
    build_algorithm(compose(["rollout.temperature=0", "algorithm=reinforce_baseline"]))
