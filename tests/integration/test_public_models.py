"""SmolLM2-135M-Instruct, a model that nobody here made, through `ludic train` with a real vLLM
server. `make smollm2` fetches it."""

import json
from pathlib import Path

import pytest
from real_vllm import vllm_or_skip
from typer.testing import CliRunner

from ludic.cli.app import app

pytestmark = pytest.mark.integration
SMOLLM2 = Path(__file__).parents[2] / "target" / "models" / "smollm2"


def write_sums(path):
    rows = [{"prompt": f"What is {n} + {n + 1}? Answer with the number only.", "answer": str(2 * n + 1)} for n in range(20)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_it_is_trained_and_sampled_through_vllm(tmp_path, monkeypatch):
    vllm_or_skip()
    if not SMOLLM2.is_dir():
        pytest.skip("there is no target/models/smollm2; `make smollm2` fetches it")
    (tmp_path / "lengths.py").write_text(
        "def tokens(completion_ids, **_):\n    return [len(ids) / 8 for ids in completion_ids]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = ["rollout.prompts=2", "rollout.group_size=8", "rollout.max_new_tokens=8", "evaluation.prompts=2"]
    where = [f"output={tmp_path}", "name=run", "inference=vllm", "inference.device=cpu"]
    data = [f"model={SMOLLM2}", f"data={write_sums(tmp_path / 'sums.jsonl')}", "reward=lengths:tokens", "steps=2"]
    result = CliRunner().invoke(app, ["train", *data, *settings, *where])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["weight_sync"]["pushes"] == 2
    assert found["mismatch"]["preflight"]["mean"] < 1e-4
