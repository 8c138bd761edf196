"""Every `python` block of the README and of the pages in docs/ runs as printed, in order, in one
namespace per page. Code that needs a server that the tests lack is in `py` blocks."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benches" / "results").glob("*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[int, str]]:
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start()) + 2, match.group(1)) for match in FENCE.finditer(text)]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_every_python_example_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ludic.training.reward_functions._OWN", {})  # names that the page registers end with it
    namespace: dict[str, object] = {"__name__": "example"}
    for line, source in blocks(page):
        padded = "\n" * (line - 1) + source  # shows the line of the page in a traceback
        exec(compile(padded, str(page), "exec"), namespace)
    assert len(namespace) > 2, f"the examples of {page.name} define nothing"


def test_the_page_shows_how_to_write_each_part_in_under_30_lines():
    sources = [source for _, source in blocks(ROOT / "docs" / "your-own-problem.md")]
    for part in ("def compute(self, logits", "def compute(self, rollouts", "def env_step("):
        matching = [source for source in sources if part in source]
        assert matching, f"the page has no example with `{part}`"
        assert all(len(source.strip().splitlines()) < 30 for source in matching)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_no_placeholders_and_no_broken_links(page):
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"@[A-Z_]+@|\bTODO\b|\bTBD\b", text)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith("http")]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []
