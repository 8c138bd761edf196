"""The name of the distribution, its version, and the other project that has the same import
package."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ludic
from ludic import _core
from ludic.distribution import DISTRIBUTION, install_command
from ludic.errors import StaleBuildError

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "python" / "ludic"
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_project_has_the_name_and_each_command_names_an_extra_of_it():
    assert PYPROJECT["project"]["name"] == DISTRIBUTION == "ludic-rl"
    assert install_command("wandb") == "pip install 'ludic-rl[wandb]'"
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *PACKAGE.rglob("*.py")]
    lists = [names for page in pages for names in re.findall(r"ludic-rl\[([\w,-]+)\]", page.read_text(encoding="utf-8"))]
    named = {extra for names in lists for extra in names.split(",")}
    assert len(named) > 5
    assert named <= set(PYPROJECT["project"]["optional-dependencies"])


def test_nothing_installs_the_other_project():
    kinds = (".md", ".py", ".yml", ".yaml", ".toml", ".sh", "")
    folders = ("python", "docs", "examples", "benches", "tests", "site", ".ci", ".github")
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*") if path.suffix in kinds]
    files = [path for path in (*files, *REPOSITORY.glob("*")) if path.is_file() and path != Path(__file__)]
    assert len(files) > 1000
    wrong = re.compile(r"\bludic\\*\[|pip install ([^\n`]* )?'?ludic(?![\w-])(?!\.)")
    assert {str(path) for path in files if wrong.search(path.read_text(encoding="utf-8", errors="ignore"))} == set()


def test_python_and_the_extension_have_one_version():
    workspace = tomllib.loads((REPOSITORY / "Cargo.toml").read_text(encoding="utf-8"))["workspace"]
    assert workspace["package"]["version"] == ludic.__version__ == _core.__version__
    assert f"\nversion: {ludic.__version__}\n" in (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")


def run_python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(path)!r}]\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, cwd=path, timeout=120)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder of packages with links to the files of ludic, some of which a test replaces."""
    (tmp_path / "ludic").mkdir()
    for path in PACKAGE.iterdir():
        (tmp_path / "ludic" / path.name).symlink_to(path)
    (tmp_path / "ludic" / "__init__.py").unlink()
    return tmp_path


def install_namesake(folder: Path) -> None:
    (folder / "ludic-1.0.3.dist-info").mkdir()
    (folder / "ludic-1.0.3.dist-info" / "METADATA").write_text("Metadata-Version: 2.4\nName: ludic\nVersion: 1.0.3\n")


NAMESAKE = "ludic 1.0.3 is installed too: another project, which overwrites files of ludic-rl"
MAIN = "sys.argv = ['ludic', *{arguments!r}]\nfrom ludic.cli.app import main\nmain()"


def test_the_script_names_the_other_project_if_it_has_replaced_our_files(copied):
    (copied / "ludic" / "__init__.py").write_text('__all__ = ("Attrs", "Block")\n')
    install_namesake(copied)
    ran = run_python(MAIN.format(arguments=["train"]), copied)
    assert ran.returncode == 1
    assert NAMESAKE in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_doctor_names_the_other_project_beside_ours(copied):
    (copied / "ludic" / "__init__.py").symlink_to(PACKAGE / "__init__.py")
    assert NAMESAKE not in run_python(MAIN.format(arguments=["doctor"]), copied).stdout
    install_namesake(copied)
    ran = run_python(MAIN.format(arguments=["doctor"]), copied)
    assert NAMESAKE in ran.stdout


def test_an_extension_of_another_version_is_refused_in_one_line(copied):
    own = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    (copied / "ludic" / "__init__.py").write_text(own.replace(f'"{ludic.__version__}"', '"9.9.9"'))
    ran = run_python("from ludic import _core", copied)
    assert re.search(rf"{StaleBuildError.__name__}: ludic 9\.9\.9 .*built from {re.escape(ludic.__version__)}", ran.stderr)
    ran = run_python(MAIN.format(arguments=["train", "steps=1"]), copied)
    assert ran.returncode != 0
    assert ran.stderr.startswith("ludic: ludic 9.9.9 has an extension")
    assert len(ran.stderr.splitlines()) == 1
    assert "missing or stale" in run_python(MAIN.format(arguments=["doctor"]), copied).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the scripts of a release read."""
    for name in (".ci/check-release", ".ci/name-repository", "Cargo.toml", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    ("tag", "changes", "said"),
    [
        (
            f"v{ludic.__version__}",
            f"# Changelog\n\n## {ludic.__version__} (2026-12-01)\n\n- New.\n\n## 0.0.9\n\n- Old.\n",
            "- New.",
        ),
        (f"v{ludic.__version__}", f"## {ludic.__version__} (unreleased)\n\n- New.\n", "write its date"),
        (f"v{ludic.__version__}", "## 0.0.9\n\n- Old.\n", f"no section '## {ludic.__version__}'"),
        ("v9.9.9", f"## {ludic.__version__}\n\n- New.\n", f"the tag of this release is v{ludic.__version__}"),
    ],
)
def test_a_release_needs_one_version_in_tag_crate_and_changelog(checkout, tag, changes, said):
    (checkout / "CHANGELOG.md").write_text(changes)
    ran = subprocess.run(["bash", checkout / ".ci/check-release", tag], capture_output=True, text=True, timeout=60)
    assert said in (ran.stdout if ran.returncode == 0 else ran.stderr)
    assert (ran.returncode == 0) == (said == "- New.")
    assert "Old" not in ran.stdout


def test_a_release_links_to_its_repository(checkout):
    subprocess.run(["bash", checkout / ".ci/name-repository", "https://host/some/ludic"], check=True, timeout=60)
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Issues"] == "https://host/some/ludic/issues"
    assert project["name"] == DISTRIBUTION
