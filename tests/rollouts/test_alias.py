"""The top-level name `rollouts`: bound on request, one identity with `ludic.rollouts`, and never in
the place of another package."""

import importlib
import subprocess
import sys

import ludic.rollouts
import ludic.rollouts.alias
import ludic.rollouts.training.types


def test_a_module_has_one_identity_under_both_names():
    import rollouts
    from rollouts.training import Sample, types

    assert rollouts is ludic.rollouts
    assert types is ludic.rollouts.training.types
    assert Sample is ludic.rollouts.training.types.Sample
    assert types.__spec__.name == "ludic.rollouts.training.types"
    assert importlib.import_module("rollouts.training.types") is types


def run(code, cwd):
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=600)
    return (done.stdout + done.stderr).strip()


def test_the_name_is_bound_on_request_only(tmp_path):
    assert "No module named 'rollouts'" in run("import ludic.rollouts.training.types, rollouts.training", tmp_path)
    assert (
        run("import ludic.rollouts.alias; from rollouts.training.types import Sample; print(Sample(1).prompt)", tmp_path) == "1"
    )
    assert "No module named 'rollouts.agentz'" in run("import ludic.rollouts.alias; import rollouts.agentz", tmp_path)


def test_another_package_of_that_name_is_not_hidden(tmp_path):
    (tmp_path / "rollouts").mkdir()  # a folder of results is no package
    code = "import sys; sys.path.insert(0, '.'); import ludic.rollouts.alias; import rollouts; print(rollouts.__name__)"
    assert run(code, tmp_path) == "ludic.rollouts"
    (tmp_path / "rollouts" / "__init__.py").touch()
    assert "is already another package" in run(code, tmp_path)
