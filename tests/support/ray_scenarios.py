"""Faults on Ray: a cluster on this machine, and one of three machines.

As a script it takes a folder, and prints a line of JSON for each scenario: its name and its result.
It is run in a network and process namespace of its own, since Ray listens on all interfaces.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from processes import wait_for_end

TOKEN = "0123456789abcdef0123456789abcdef"
ROLES = Path(__file__).with_name("ray_roles.py")
PLACE = """
import json, sys
from pathlib import Path
from ludic.launch.process import Process
from ludic.launch.ray import RayPlace
RayPlace([Process("big", "trainer", ("true",), cpus=int(sys.argv[2]))], Path("."), address=sys.argv[1], room_s=3.0)
"""


def run_python(arguments, environment, timeout_s=240):
    command = [sys.executable, *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=timeout_s)


def play(folder, address, kills, environment, options):
    folder.mkdir()
    task = json.dumps({"folder": str(folder), "address": address, "options": options, "kills": kills})
    done = run_python([str(ROLES), task], environment)
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines else {"error": done.stderr[-2000:]}


def refusal(address, cpus, environment):
    """The error of a place that cannot be made."""
    done = run_python(["-c", PLACE, address, str(cpus)], environment)
    return done.returncode, done.stderr.strip().splitlines()[-1]


def start_node(environment, *arguments):
    flags = ["--disable-usage-stats", "--object-store-memory=80000000", "--node-ip-address=127.0.0.1", *arguments]
    done = run_python(["-m", "ray.scripts.scripts", "start", *flags], environment)
    assert done.returncode == 0, done.stdout + done.stderr


def watch_the_end(pids):
    """Those that still run after a minute, and the seconds until the others had ended."""
    began = time.monotonic()
    left = [pid for pid in pids if not wait_for_end(pid)]
    return {"left": left, "seconds": round(time.monotonic() - began, 2)}


def scenarios(folder, targets):
    """`targets`: what is killed. A node is one of the cluster of three machines."""
    nodes = [target for target in targets if target.startswith("node of ")]
    kills = [target for target in targets if target not in nodes]
    yield "local", play(folder / "local", "local", kills, {}, {"num_cpus": 4})
    yield "driver", watch_the_end(play(folder / "driver", "local", ["driver"], {}, {"num_cpus": 4}))
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    start_node(token, "--head", "--port=6399", "--num-cpus=0", "--include-dashboard=false")
    for _ in range(2):
        start_node(token, "--address=127.0.0.1:6399", "--num-cpus=3")
    yield "no room", refusal("127.0.0.1:6399", 64, token)
    yield "wrong token", refusal("127.0.0.1:6399", 1, {**token, "RAY_AUTH_TOKEN": "f" * 32})
    yield "machines", play(folder / "machines", "127.0.0.1:6399", nodes, token, {})
    start_node({"RAY_AUTH_MODE": "disabled"}, "--head", "--port=6398", "--num-cpus=1", "--include-dashboard=false")
    yield "no token", refusal("127.0.0.1:6398", 1, token)


if __name__ == "__main__":
    for name, result in scenarios(Path(sys.argv[1]), sys.argv[2:]):
        print(json.dumps([name, result]), flush=True)
