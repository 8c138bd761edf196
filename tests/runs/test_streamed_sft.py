"""`ludic sft streaming=true`: a run that reads its data while training, resumed and measured."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import commands
import pytest
from commands import NETWORK, same_weights, summary_of, write_rows

sft, refused, train_until = (partial(do, "sft") for do in (commands.ludic, commands.refused, commands.train_until))


@pytest.fixture
def streamed(tmp_path: Path) -> list[str]:
    """40 rows with 20 prompts, each twice, in blocks of 16."""
    rows = [{"prompt": f"{n % 20}+1=", "completion": str(n % 20 + 1)} for n in range(40)]
    data = write_rows(tmp_path / "data.jsonl", *rows)
    settings = ["threads=1", "batch_size=4", "streaming=true", "shuffle_buffer=16", "heldout=0.2", "trainer.warmup_steps=0"]
    return [*NETWORK, *settings, f"data={data}", f"output={tmp_path}", "name=run"]


def test_a_streamed_run_learns_and_holds_out_whole_prompts(streamed: list[str], tmp_path: Path) -> None:
    """A fifth of the first 16 rows, 3 prompts, is held out; 34 of 40 rows are trained on a pass.
    The steps are those of the 37 rows that are surely not held out: 3 * 37 / 4, rounded up."""
    shown = sft(*streamed, "epochs=3")
    assert "the first 16 rows: 16 rows of prompt_completion (prompt, completion)" in shown
    summary = summary_of(tmp_path / "run")
    assert (summary["steps"], summary["data"]["heldout_samples"], summary["data"]["samples"]) == (28, 3, 112)
    assert summary["epochs"] == 3  # 112 samples are three passes of 34, and ten
    assert summary["after"]["loss"] < summary["before"]["loss"]
    sft("--resume", str(tmp_path / "run"))  # shows the report again
    assert summary_of(tmp_path / "run") == summary


@pytest.mark.parametrize("step", [3, 11])
def test_a_stopped_run_resumes_bit_for_bit(streamed: list[str], tmp_path: Path, step: int) -> None:
    """In the first pass and in the second."""
    settings = [*streamed, "steps=14"]
    sft(*settings, "name=whole")
    assert train_until(step, settings) == 130
    sft("--resume", str(tmp_path / "run"))
    assert same_weights(tmp_path / "whole", tmp_path / "run")
    whole, run = (summary_of(tmp_path / name) for name in ("whole", "run"))
    assert (whole["data"], whole["after"]) == (run["data"], run["after"])


def test_what_a_stream_cannot_do_is_refused(streamed: list[str], tmp_path: Path) -> None:
    texts = write_rows(tmp_path / "texts.jsonl", *({"text": f"text {n}"} for n in range(20)))
    said = refused(*streamed, f"data={texts}")
    assert ": a row may make several samples; set steps=N" in said
    assert "data is null; name a file, or set streaming=false" in refused("streaming=true", f"output={tmp_path}")
    assert not (tmp_path / "run").exists()


def test_other_data_is_not_resumed(streamed: list[str], tmp_path: Path) -> None:
    assert train_until(3, [*streamed, "steps=10"]) == 130
    changed = write_rows(tmp_path / "data.jsonl", *({"prompt": f"{n % 20}+2=", "completion": "0"} for n in range(40)))
    assert changed.is_file()
    assert "the saved position has data=" in refused("--resume", str(tmp_path / "run"))


def test_folders_of_shards_are_streamed(streamed: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    rows: list[dict[str, Any]] = [{"prompt": f"{n}>", "completion": str(n)} for n in range(10)]
    for index in range(2):
        (folder / f"{index}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[5 * index : 5 * index + 5]))
    sft(*streamed, f"data={folder}", "heldout=0", "epochs=2")
    assert summary_of(tmp_path / "run")["data"]["samples"] == 20
