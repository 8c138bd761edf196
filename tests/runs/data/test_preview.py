"""`ludic sft --preview`: the tokens that are trained, marked, with counts."""

import io
import json
import re
from pathlib import Path

import commands
import pytest
from commands import write_rows
from rich.console import Console

from ludic import SFT
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.recipes.epochs_schema import compose_sft
from ludic.runs.data.preview import Preview, SamplePreview, Span, preview

ROWS = [{"instruction": f"{n}+1=", "output": str(n + 1)} for n in range(5)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", *ROWS)


def test_a_pipe_gets_brackets_and_no_escapes(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = commands.ludic("sft", f"data={data}", "--preview", "2")
    assert f"{data}: 5 rows of alpaca (instruction, output)" in shown
    assert "### Response:\n⟦1<eos>⟧" in shown
    assert "⟦2<eos>⟧" in shown
    assert "⟦3<eos>⟧" not in shown
    assert "\x1b" not in shown
    assert "2 of 5 rows: 2 samples, 4 of " in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]  # nothing is written
    assert "⟦3<eos>⟧" in commands.ludic("sft", f"data={data}", "--preview")  # three rows unless a number is given
    assert "--preview (0) must be at least 1" in commands.refused("sft", f"data={data}", "--preview", "0")


def test_a_terminal_gets_colours(data: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    preview(compose_sft([f"data={data}"]), make_byte_tokenizer(), 1).show(console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[32m1<eos>\x1b[0m" in shown
    assert "⟦" not in shown


def test_what_is_cut_is_counted(data: Path) -> None:
    """A row has the tokens of the prompt, `1` and the end token; cut to all but the last, one
    trained token of two is left."""
    whole = preview(compose_sft([f"data={data}"]), make_byte_tokenizer(), 1).samples[0]
    assert (whole.trained_tokens, whole.cut_tokens) == (2, 0)
    limit = f"trainer.max_seq_len={whole.tokens - 1}"
    cut = preview(compose_sft([f"data={data}", limit]), make_byte_tokenizer(), 1).samples[0]
    assert (cut.tokens, cut.trained_tokens, cut.cut_tokens, cut.cut_trained_tokens) == (whole.tokens - 1, 1, 1, 1)
    assert [(span.text[-3:], span.trained) for span in cut.spans] == [("e:\n", False), ("1", True)]
    assert re.search(
        r"1 tokens beyond trainer\.max_seq_len .*1 of them", commands.ludic("sft", f"data={data}", limit, "--preview")
    )


def test_json_has_the_spans(data: Path) -> None:
    shown = json.loads(commands.ludic("sft", f"data={data}", "--preview", "1", "--json"))
    assert shown["rows"] == 5
    assert shown["samples"][0]["spans"][-1] == {"text": "1<eos>", "trained": True}


def test_the_object_has_a_preview(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    SFT(None, ROWS, output=str(tmp_path)).preview(1)
    assert "⟦1<eos>⟧" in capsys.readouterr().out


def test_no_text_of_the_data_reaches_the_terminal_as_a_command() -> None:
    """Neither a text, nor a column or a file that a line names."""
    sample = SamplePreview("f\x1b[1m:1", 2, 1, 0, 0, (Span("a\x1b[2J\nb\tc", False), Span("\u202e\x07", True)))
    file = io.StringIO()
    Preview(("column \x1b]0;title\x07",), 1, (sample,)).show(Console(file=file, soft_wrap=True))
    assert not {"\x1b", "\x07", "\u202e"} & set(file.getvalue())
    assert "a\\x1b[2J\nb" in file.getvalue()
