"""docs/algorithms.md lists every algorithm with its paper."""

import re
from pathlib import Path

from ludic.training.presets.registry import REGISTRY

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_table_has_every_algorithm_with_its_paper():
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert dict(rows) == {name: preset.paper for name, preset in REGISTRY.items()}
    assert len(rows) == len(REGISTRY)
