"""Pages of the site that no file in docs/ has: those at the root of the repository, one per command
with all settings, and one per public module. MkDocs calls the `on_` functions (hooks of
mkdocs.yml)."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))  # MkDocs loads this file by its path

from settings_pages import write_settings_pages

import ludic
from ludic.importing import MOVED, home_of

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    "docs/README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/sft_then_rl.py": "sft_then_rl.md",
    "benches/results/trl.md": "results-trl.md",
    "benches/results/tasks.md": "results-tasks.md",
    "benches/results/speed.md": "results-speed.md",
    "benches/results/reliability.md": "results-reliability.md",
}
"""File of the repository -> page of the site. The other pages keep their names in docs/."""
COPIED = (
    "examples/with_openai_agents.py",
    "examples/with_pydantic_ai.py",
    "examples/e2b_sandbox.py",
    "examples/small_chat.yaml",
    "benches/results/public_models.json",
)
"""Files outside of docs/ to which pages link: the site has copies under the same paths."""
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the generated pages into the menu, the version below each page, and a link to edit it if
    the address of the repository is known."""
    config.copyright = f"ludic {ludic.__version__} · Apache-2.0"
    config.edit_uri = "edit/main/" if config.repo_url else None
    entries: dict[str, list[Any]] = {"SETTINGS": list(write_settings_pages()), "API": list(write_api_pages())}
    assert config.nav is not None
    for part in config.nav:
        for chapter in part.values() if isinstance(part, dict) else ():
            for item in chapter:
                for title, target in item.items() if isinstance(item, dict) else ():
                    item[title] = entries.get(target, target)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    own = files.get_file_from_path("README.md")
    assert own is not None
    files.remove(own)
    generated = {page: read_root_page(source) for source, page in ROOT_PAGES.items()}
    copied = {path: (ROOT / path).read_text(encoding="utf-8") for path in COPIED}
    for file in files:
        file.edit_uri = f"docs/{file.src_uri}"
    copied["style.css"] = (ROOT / "site" / "style.css").read_text(encoding="utf-8")
    for path, text in (generated | copied | write_settings_pages() | write_api_pages()).items():
        files.append(File.generated(config, path, content=text))
    for source, page in ROOT_PAGES.items():
        files.src_uris[page].edit_uri = source
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links from docs/ to the root of the repository lead to the pages made of it."""
    return markdown if page.file.generated_by else replace_links(markdown, "docs")


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Raises RuntimeError if a page shows a fence of code as text, outside of blocks of code."""
    text = re.sub(r"<pre.*?</pre>", "", html, flags=re.DOTALL)
    if "```" in text:
        line = text[text.index("```") :].partition("\n")[0]
        raise RuntimeError(f"{page.file.src_uri} shows a fence as text: {line!r}")
    return html


def read_root_page(source: str) -> str:
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.endswith(".py"):
        return f"# {source}\n\n```python\n{text}```\n"
    if source == "README.md":  # the picture beside the first command, before the tables
        picture = next(line for line in text.splitlines() if line.startswith("!["))
        text = text.replace(f"{picture}\n\n", "").replace("**Train**", f"{picture}\n\n**Train**", 1)
    return replace_links(text, str(Path(source).parent))


def replace_links(text: str, folder: str) -> str:
    """Links as the site has them. `folder`: that of the file with `text`, from the root.

    Example: `[resume](docs/recipes.md#resume)` of README.md becomes `[resume](recipes.md#resume)`,
    and `[rules](../CONTRIBUTING.md)` of a page in docs/ becomes `[rules](contributing.md)`."""

    def replace(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = (ROOT / folder / target).resolve().relative_to(ROOT).as_posix()
        return f"]({ROOT_PAGES.get(path, path.removeprefix('docs/'))}{anchor})"

    return LINK.sub(replace, text)


@cache
def write_api_pages() -> dict[str, str]:
    """Path -> text: a page for every public module, with the objects that no shorter path has;
    `ludic.envs.LudicEnv` is not shown again as `ludic.envs.env.LudicEnv`."""
    listed: dict[str, list[str]] = json.loads((ROOT / "tests" / "public_names.json").read_text(encoding="utf-8"))
    modules = {name: import_module(name) for name in listed}
    shortest_first = sorted(
        modules, key=lambda name: (name in MOVED, name.count("."), not hasattr(modules[name], "__path__"), name)
    )
    homes = dict[int, str]()
    for module in shortest_first:
        for name in sorted(listed[module]):
            homes.setdefault(id(getattr(modules[module], name)), f"{module}.{name}")
    pages = dict[str, str]()
    for path in homes.values():
        module = path.rpartition(".")[0]
        pages[module] = pages.get(module, f"# {module}\n") + f"\n::: {home_of(module)}{path.removeprefix(module)}\n"
    return {f"api/{module}.md": pages[module] for module in sorted(pages)}
