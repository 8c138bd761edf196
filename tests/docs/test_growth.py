"""The plots of growth are those of the numbers beside them, and measured as they say."""

import json
from argparse import Namespace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benches.python import growth
from benches.python.__main__ import PROGRAMS, SUBJECTS, command_of

ROOT = Path(__file__).parents[2]
DOCS, PAGE = ROOT / "docs", ROOT / "benches" / "results" / "speed.md"


def test_the_page_has_the_numbers_of_the_plots():
    table = json.loads((DOCS / "growth.json").read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    lines = growth.format_growth(table).splitlines()[2:]
    assert len(lines) == 2 + sum(map(len, table.values()))
    for line in lines:
        assert line in page
    text = (DOCS / "growth.svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert len(text) < 100_000
    assert all(name in text for curves in table.values() for name in curves)


def test_measuring_changes_no_page_and_renewing_changes_all_its_numbers(monkeypatch, tmp_path):
    docs, measured, copy = tmp_path / "docs", tmp_path / "target" / "benches", tmp_path / "speed.md"
    docs.mkdir()
    page = PAGE.read_text(encoding="utf-8")
    copy.write_text(page, encoding="utf-8")
    table = json.loads((DOCS / "growth.json").read_text(encoding="utf-8"))
    table["tokens"] = {"another way": [{"x": 10, "seconds": 0.1, "bytes": 5e6}, {"x": 1000, "seconds": 10.0, "bytes": 5e6}]}
    monkeypatch.setattr(growth, "measure_all", lambda: table)
    monkeypatch.setattr(growth, "DOCS", docs)
    monkeypatch.setattr(growth, "PAGE", copy)
    monkeypatch.setattr(growth, "MEASURED", measured)
    assert growth.report() == growth.format_growth(table)
    assert list(docs.iterdir()) == []
    assert copy.read_text(encoding="utf-8") == page

    monkeypatch.setattr("sys.argv", ["growth", "--renew", str(measured / "growth.json")])
    growth.main()
    renewed = copy.read_text(encoding="utf-8")
    fresh = growth.format_growth(table).splitlines()[2:]
    kept = page.splitlines()
    first, rows = kept.index(fresh[0]), len(growth.format_growth(json.loads((DOCS / "growth.json").read_text())).splitlines()[2:])
    assert renewed.splitlines() == [*kept[:first], *fresh, *kept[first + rows :]]
    assert json.loads((docs / "growth.json").read_text(encoding="utf-8")) == table
    assert "another way" in (docs / "growth.svg").read_text(encoding="utf-8")


def test_a_page_without_the_table_is_an_error_and_stays(tmp_path):
    page = tmp_path / "speed.md"
    page.write_text("nothing\n", encoding="utf-8")
    table = json.loads((DOCS / "growth.json").read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="no table that begins with"):
        growth.renew(table, tmp_path, page)
    assert [path.name for path in tmp_path.iterdir()] == ["speed.md"]
    assert page.read_text(encoding="utf-8") == "nothing\n"


def test_memory_grows_with_the_logits_only_where_they_are_computed(monkeypatch, tmp_path):
    monkeypatch.setattr("ludic.training.loss.token_scores.TILE_ELEMENTS", 1 << 12)
    table = growth.measure_all(tokens=(64, 256), vocabularies=(1024, 4096), samples=(16, 64), ranks=(1, 8), rounds=1)
    # float32 logits that are added: 192 tokens x 32,768, and 1,024 tokens x 3,072 of the vocabulary
    for axis, logits in (("tokens", 4 * 192 * 32_768), ("vocabulary", 4 * 1024 * 3072)):
        added = {name: points[1]["bytes"] - points[0]["bytes"] for name, points in table[axis].items()}
        assert added["all logits"] >= logits
        assert added["no logits"] <= 0.3 * logits  # of the vocabulary: the gradient of the layer, 4 x 3072 x 256, a quarter
    [ranks] = table["ranks"].values()
    assert [point["bytes"] for point in ranks] == [8 * 64, 8 * 64 * 8]  # an index of each sample, 8 bytes
    growth.draw(table, tmp_path / "plot.svg")
    assert "read lists" in (tmp_path / "plot.svg").read_text(encoding="utf-8")


def test_the_exponent_is_the_slope_between_the_ends():
    points = [{"x": 10, "seconds": 0.1, "bytes": 5e6}, {"x": 1000, "seconds": 10.0, "bytes": 5e6}]
    line = growth.format_growth({"tokens": {"way": points}}).splitlines()[-1]
    assert line == "| way | 10, 1,000 tokens | 0.1, 10 | 1.00 | 5, 5 | 0.00 |"  # log(100) / log(100), log(1) / log(100)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_of_the_page_is_run_in_one_go(program):
    assert program in PAGE.read_text(encoding="utf-8")
    assert (Path(growth.__file__).with_name(f"{program}.py")).is_file()
    assert program not in SUBJECTS
    command = command_of(program, Namespace(trl_python="trl", vllm_python=None))
    assert command[-2:] == (["--trl-python", "trl"] if PROGRAMS[program] else ["-m", f"benches.python.{program}"])
