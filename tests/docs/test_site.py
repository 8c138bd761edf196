"""The pages of the site that docs/ does not have. `make site` builds all of it, and fails on a
broken link."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from ludic.recipes.compose import list_settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages():
    sys.path.insert(0, str(ROOT / "site"))
    try:
        yield importlib.import_module("generated_pages")
    finally:
        sys.path.remove(str(ROOT / "site"))


@pytest.mark.parametrize(
    ("link", "folder", "page"),
    [
        ("[a](docs/recipes.md#resume)", ".", "[a](recipes.md#resume)"),
        ("[a](../CONTRIBUTING.md)", "docs", "[a](contributing.md)"),
        ("[a](../README.md#install)", "docs", "[a](index.md#install)"),
        ("[a](README.md)", "docs", "[a](overview.md)"),
        ("![a](docs/first-run.png)", ".", "![a](first-run.png)"),
        ("[a](https://example.org/docs/x.md)", ".", "[a](https://example.org/docs/x.md)"),
        ("[a](#resume)", "docs", "[a](#resume)"),
    ],
)
def test_links_lead_to_the_pages_of_the_site(pages, link, folder, page):
    assert pages.replace_links(link, folder) == page


def test_every_setting_of_a_recipe_stands_on_its_page_with_its_help_text(pages):
    page = pages.write_settings_pages()["settings/train.md"]
    missing = [name for name in list_settings() if f"`{name}`" not in page and f"## {name}" not in page]
    assert missing == []
    assert "| `rollout.group_size` | `8` | Answers per problem. |" in page


def test_every_public_object_stands_on_one_page_under_its_shortest_path(pages):
    listed = [
        line.removeprefix("::: ") for page in pages.write_api_pages().values() for line in page.splitlines() if ":::" in line
    ]
    assert "ludic.envs.LudicEnv" in listed
    assert "ludic.envs.env.LudicEnv" not in listed
    assert "ludic.agents.Agent" in listed
    assert {"ludic.envs.Sample", "ludic.rollouts.training.Sample"} <= set(listed)  # one name, two objects
    public = json.loads((ROOT / "tests" / "public_names.json").read_text(encoding="utf-8"))
    objects = {id(getattr(importlib.import_module(module), name)) for module, names in public.items() for name in names}
    shown = [id(getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2])) for path in listed]
    assert sorted(shown) == sorted(objects)


def test_the_menu_has_every_page(pages):
    menu = re.findall(r"(\S+\.md)$", (ROOT / "site" / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    here = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(menu) == sorted(here | set(pages.ROOT_PAGES.values()))
