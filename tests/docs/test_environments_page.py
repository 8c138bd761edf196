"""The task of docs/environments.md on a Gymnasium environment trains as printed, in fewer steps."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
FEWER = {
    "max_turns = 12": "max_turns = 3",
    "steps=60": 'steps=1, threads=1, rollout={"prompts": 2, "group_size": 2}, evaluation={"prompts": 2, "samples_per_prompt": 1}',
    'warmup={"steps": 100}': 'warmup={"steps": 1, "batch_size": 2}',
    '{"max_positions": 1024}': '{"max_positions": 1024, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}',
}


def test_a_task_on_a_gymnasium_environment_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [source] = re.findall(r"^```python lake\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for old, new in FEWER.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "docs/environments.md", "exec"), names)
    assert (Path("runs") / "lake" / "summary.json").is_file()
    assert "kind: FrozenLake" in (Path("runs") / "lake" / "config.yaml").read_text()
