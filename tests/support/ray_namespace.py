"""Runs a command where Ray may run: it listens on all interfaces, so the command gets a network
namespace with a loopback interface only, whose processes all end with it."""

import os
import subprocess

import pytest

NAMESPACE = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
LOOPBACK = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def run_in_namespace(command, folder, *, env=None, timeout_s=540):
    """The completed process; its home is below `folder`, where it also runs. Skips the test where
    Ray or namespaces are missing."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    try:
        subprocess.run([*NAMESPACE, *LOOPBACK, "true"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"Ray listens on all interfaces, and no network namespace can be made here: {error}")
    home = folder / "home"
    home.mkdir(parents=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables |= {"HOME": str(home), **(env or {})}
    return subprocess.run(
        [*NAMESPACE, *LOOPBACK, *command], env=variables, cwd=folder, capture_output=True, text=True, timeout=timeout_s
    )
