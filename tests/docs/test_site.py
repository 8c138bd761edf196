"""The pages of the site that docs/ does not have. `make site` builds all of it, and fails on a
broken link."""

import importlib
import json
import re
import sys
from functools import reduce
from pathlib import Path

import pytest
import yaml

from ludic.recipes.compose import compose, list_settings, to_plain_values
from ludic.recipes.epochs_schema import compose_dpo, compose_rm, compose_sft

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


def test_the_site_has_every_file_to_which_a_page_links(pages):
    sources = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in pages.ROOT_PAGES if name.endswith(".md"))]
    linked = {
        (source.parent / match[1]).resolve().relative_to(ROOT).as_posix()
        for source in sources
        for match in pages.LINK.finditer(source.read_text(encoding="utf-8"))
        if "://" not in match[1]
    }
    outside = {path for path in linked if not path.startswith("docs/")}
    assert outside <= {*pages.ROOT_PAGES, *pages.COPIED}


def recipes():
    return {"train": compose(["sort"]), "sft": compose_sft([]), "train-rm": compose_rm([]), "dpo": compose_dpo([])}


def leaves(values, prefix=""):
    """The paths of the values that `--print-config` shows, but for the arguments of tasks and
    algorithms, which have no schema."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and not path.endswith(("args", "per_algorithm", "loaded_model")):
            yield from leaves(value, f"{path}.")
        else:
            yield path


@pytest.mark.parametrize("command", ["train", "sft", "train-rm", "dpo"])
def test_the_page_of_a_command_has_exactly_its_settings_and_their_values(pages, command):
    page = pages.write_settings_pages()[f"settings/{command}.md"]
    values = to_plain_values(recipes()[command])
    shown = dict(re.findall(r"^\| `([\w.]+)` \| `(.*?)` \| ", page, re.MULTILINE))
    assert sorted(shown) == sorted(leaves(values))
    assert len(shown) == len(re.findall(r"^\| `", page, re.MULTILINE))
    for path, text in shown.items():
        expected = reduce(lambda section, name: section[name], path.split("."), values)
        assert yaml.safe_load(text.replace("\\|", "|")) == expected, path


@pytest.mark.parametrize("command", ["train", "sft", "train-rm", "dpo", "eval"])
def test_every_setting_of_a_command_has_a_help_text(pages, command):
    page = pages.write_settings_pages()[f"settings/{command}.md"]
    rows = re.findall(r"^\| `([\w.]+)` \| `.*?` \| (.*)\|$", page, re.MULTILINE)
    assert rows
    assert [name for name, meaning in rows if len(meaning.strip()) < 5] == []


def test_the_page_of_a_command_has_the_words_of_its_schema(pages):
    written = pages.write_settings_pages()
    assert "| `rollout.group_size` | `8` | Answers per problem. |" in written["settings/train.md"]
    assert "| `rows` | `8000` | Demonstrations to generate if `data` is null. |" in written["settings/sft.md"]
    nll = "Weight of the negative log-likelihood of the chosen answers, per token; 0: without it. For sigmoid, ipo and robust."
    assert f"| `loss.nll_coeff` | `2.0` | {nll} |" in written["settings/dpo.md"]
    assert (
        "| `columns.chosen` | `null` | The column of the better response; null: the one of the row's format. |"
        in written["settings/train-rm.md"]
    )


def test_all_settings_of_train_are_in_its_page(pages):
    """Those of every recipe, with sections that `sort` leaves empty."""
    page = pages.write_settings_pages()["settings/train.md"]
    assert [name for name in list_settings() if f"`{name}`" not in page and f"## {name}" not in page] == []


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
