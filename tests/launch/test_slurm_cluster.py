"""Jobs on a real Slurm: three nodes that are this machine, with servers and trainers that are
scripts, and a real run."""

import re
import sys

import pytest
from free_ports import free_ports
from slurm_cluster import slurm_cluster_or_skip, wait_until

from ludic.launch.process import Process
from ludic.launch.slurm import SlurmJob, SlurmSettings, batch_script, write_script
from ludic.launch.slurm.settings import write_settings

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("slurm")]
FIRST = free_ports(2)
SECOND = FIRST + 1
"""Ports of the servers."""
SERVER = """
import http.server, os, sys, time
from pathlib import Path
job, port = os.environ["SLURM_JOB_ID"], int(sys.argv[sys.argv.index("--port") + 1])
said = f"server on {os.environ['SLURMD_NODENAME']} {sys.argv[1:]} {os.environ['CUDA_VISIBLE_DEVICES']}\\n"
os.write(1, said.encode())  # at once: both servers have one log
if os.environ.get("SERVER") == "dies":
    sys.exit(7)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if os.environ.get("SERVER") == "ill" else 200)
        self.end_headers()
    def log_message(self, *args):
        pass
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
server.timeout = 0.1
while not Path(f"die-{job}").exists():
    server.handle_request()
sys.exit(9)
"""
TRAINER = """
import os, signal, sys, time
def say(*words):  # in one write: several processes share a log, and their output is not buffered
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def save(*_):
    say("rank", os.environ["SLURM_PROCID"], "saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
say("rank", os.environ["SLURM_PROCID"], "of", os.environ["SLURM_NTASKS"], "on", os.environ["SLURMD_NODENAME"],
    os.environ["CUDA_VISIBLE_DEVICES"], len(os.environ["LUDIC_SERVER_SECRET"]), sys.argv[1:])
code = os.environ.get("TRAINER", "0")
if code == "waits" or (code == "3" and os.environ["SLURM_PROCID"] == "0"):
    time.sleep(600)
sys.exit(int(code))
"""
PYTHON = f"""#!/bin/bash
# The agent of the ranks is a script here; everything else is real.
case " $* " in
*" ludic.training.ranks.agent "*) exec {sys.executable} trainer.py "$@" ;;
*) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster_or_skip(tmp_path_factory.mktemp("slurm"), nodes=3, gpus=4) as running:
        for name, text in (("server.py", SERVER), ("trainer.py", TRAINER), ("python", PYTHON)):
            (running.shared / name).write_text(text)
        (running.shared / "python").chmod(0o755)
        (running.shared / "logs").mkdir()
        yield running


def submit(cluster, *, job="", train=("-m", "ludic.cli", "train"), **changes):
    settings = {"nodes": 3, "gpus_per_node": 4, "cpus_per_task": 2, "time": "10", "logs": "logs", "python": "./python"}
    settings |= {"server": ("server.py",), "data_parallel": 2, "tensor_parallel": 2, "server_port": FIRST}
    settings |= {"environment": {}, **changes}
    made = SlurmSettings(train=train, **settings)
    name = f"job{len(list(cluster.shared.glob('*.sh')))}"
    (cluster.shared / f"{name}.json").write_text(write_settings(made))
    (cluster.shared / f"{name}.sh").write_text(batch_script(made, settings_file=f"{name}.json"))
    return f"{name}.sh"


def read(cluster, pattern):
    return "".join(path.read_text() for path in sorted((cluster.shared / "logs").glob(pattern)))


def trains(cluster, job, ranks=2):
    return lambda: read(cluster, f"train_{job}.log").count(" of ") == ranks


def test_servers_and_trainers_are_where_the_plan_says(cluster):
    job = cluster.submit(submit(cluster))
    assert cluster.wait(job) == 0
    said = read(cluster, f"*-{job}.out")
    assert f"healthy: http://n3:{FIRST}" in said
    assert f"healthy: http://n3:{SECOND}" in said
    assert f"server on n3 ['--host', 'n3', '--port', '{SECOND}', '--', '--tensor-parallel-size', '2'] 2,3" in said
    ranks = sorted(line for line in read(cluster, f"train_{job}.log").splitlines() if line.startswith("rank "))
    assert [rank.split(" [")[0] for rank in ranks] == ["rank 0 of 2 on n1 0,1,2,3 64", "rank 1 of 2 on n2 0,1,2,3 64"]
    assert "'--nnodes=2', '--nproc-per-node=4'" in ranks[0]
    assert f"'inference.url=[http://n3:{FIRST},http://n3:{SECOND}]', 'inference.trainer_address=n1'" in ranks[0]


def test_one_node_serves_on_its_first_gpu_and_trains_on_the_others(cluster):
    job = cluster.submit(submit(cluster, nodes=1, data_parallel=1, tensor_parallel=1))
    assert cluster.wait(job) == 0
    assert f"'--host', '127.0.0.1', '--port', '{FIRST}'" in read(cluster, f"vllm-{job}.out")
    assert "rank 0 of 1 on n1 1,2,3 64" in read(cluster, f"train_{job}.log")


def test_the_status_of_a_job_is_that_of_the_rank_that_failed(cluster):
    job = cluster.submit(submit(cluster, stop_before_end_s=1), TRAINER="3")
    assert cluster.wait(job) == 3


def test_a_server_that_dies_before_training_ends_the_job(cluster):
    job = cluster.submit(submit(cluster), SERVER="dies")
    assert cluster.wait(job) == 1
    assert "ended with status 7" in read(cluster, f"*-{job}.out")
    assert read(cluster, f"train_{job}.log") == ""


def test_a_server_that_dies_while_training_lets_the_trainer_save(cluster):
    job = cluster.submit(submit(cluster), TRAINER="waits")
    wait_until(trains(cluster, job), "both ranks train")
    (cluster.shared / f"die-{job}").touch()
    assert cluster.wait(job) == 1
    assert "status 9; the trainer saves and ends" in read(cluster, f"*-{job}.out")
    assert {"rank 0 saved", "rank 1 saved"} <= set(read(cluster, f"train_{job}.log").splitlines())


def test_a_server_that_is_never_healthy_ends_the_job(cluster):
    job = cluster.submit(submit(cluster, health_timeout_s=1.0), SERVER="ill")
    assert cluster.wait(job) == 1
    assert re.search(f"http://n3:{FIRST} .*not healthy within 1 s; .*logs", read(cluster, f"*-{job}.out"))


def test_before_the_time_limit_every_rank_saves(cluster):
    """Slurm signals the batch process, as `scancel --batch` does."""
    job = cluster.submit(submit(cluster), TRAINER="waits")
    wait_until(trains(cluster, job), "both ranks train")
    cluster.run("scancel", "--signal=TERM", "--batch", job)
    assert cluster.wait(job) == 143
    assert {"rank 0 saved", "rank 1 saved"} <= set(read(cluster, f"train_{job}.log").splitlines())


def test_a_job_that_is_cancelled_leaves_nothing_running(cluster):
    job = cluster.submit(submit(cluster), TRAINER="waits")
    wait_until(trains(cluster, job), "both ranks train")
    cluster.run("scancel", job)
    wait_until(
        lambda: not {"server.py", "trainer.py", "slurm.job"} & set(cluster.processes().replace("/", " ").split()), "all ended"
    )
    cluster.wait(job)
    assert cluster.state(job)["JobState"] == "CANCELLED"


SAVES = """
import signal, sys, time
from pathlib import Path
def save(*_):
    Path("saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while not Path("saved").exists():
    time.sleep(0.05)
"""
ENDS = """
import signal, sys, time
def end(*_):
    print("asked to end", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
time.sleep(600)
"""


def test_a_run_of_several_processes_saves_before_the_time_limit_and_is_queued_again(cluster):
    """The script of `place=slurm`. A SIGTERM for `srun` itself would kill the step; it is sent only
    where `scancel` fails."""
    (cluster.shared / "saves.py").write_text(SAVES)
    (cluster.shared / "ends.py").write_text(ENDS)
    commands = [("trainer", "saves.py"), ("actor", "ends.py")]
    processes = [Process(name, name, ("python", f"{cluster.shared}/{file}")) for name, file in commands]
    job = SlurmJob("place", nodes=2, cpus_per_node=2, time="10", python=sys.executable)
    (cluster.shared / "place.sh").write_text(write_script(processes, cluster.shared, job, cwd=cluster.shared))
    number = cluster.submit("place.sh")
    log = cluster.shared / "workers" / "trainer.log"
    wait_until(lambda: log.exists() and "ready" in log.read_text(), "the trainer trains")
    cluster.run("scancel", "--signal=USR1", "--batch", number)
    again = {"Restarts": "1", "JobState": "PENDING"}
    wait_until(lambda: cluster.state(number).items() >= again.items(), "the job is queued again")
    assert (cluster.shared / "saved").exists()
    # The end of the first life must not be taken for that of the second, which Slurm by itself
    # begins two minutes later.
    wait_until(lambda: f"slurmstepd: [{number}." not in cluster.processes(), "the steps of the first life end")
    wait_until(lambda: cluster.state(number).items() >= again.items(), "the job waits")
    # Not at once: a node refuses a job that was granted in the second in which it revoked it.
    cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now+5")
    assert cluster.wait(number) == 0
    assert log.read_text().count("ready") == 2
    assert "asked to end" in (cluster.shared / "workers" / "actor.log").read_text()
    said = (cluster.shared / f"slurm-{number}.log").read_text()
    assert "Kill job error" not in said
    assert "Force Terminated" not in said
