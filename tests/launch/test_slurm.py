"""The batch script: its text, and what bash does with it. A script beside it stands for `srun`;
there is no Slurm here."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError
from ludic.launch.process import Process
from ludic.launch.slurm.run_script import SlurmJob, _quote, write_script
from ludic.launch.supervisor import RestartBudget

GOLDEN = Path(__file__).with_name("slurm_golden.sh")
JOB = SlurmJob("run", nodes=2, cpus_per_node=8, gpus_per_node=4, options=("--partition=gpu",), python="/env/bin/python")
PROCESSES = [
    Process("trainer0", "trainer", ("python", "-m", "train", "--at={host:trainer0}:80"), cpus=4, gpus=4, restarts=2),
    Process("trainer1", "trainer", ("python", "-m", "train", "--at={host:trainer0}:80"), cpus=4, gpus=4, restarts=2),
    Process("actor0", "actor", ("python", "-m", "act", "it's"), cpus=4, env={"A": "x y"}),
]
FAKES = {
    "srun": """
while [[ $1 == --* ]]; do
    [[ $1 == --output=* ]] && exec >>"${1#--output=}" 2>&1
    [[ $1 == --job-name=* ]] && name=${1#--job-name=}
    shift
done
bash -c 'echo $$ >"$0"; exec "$@"' "$STEPS/$name" "$@" & # a step has a number before it runs
child=$!
trap 'kill -KILL $child' TERM # as Slurm does: the step is killed
wait $child; status=$?
kill -0 $child 2>/dev/null && { wait $child; status=$?; }
rm -f "$STEPS/$name"
exit $status
""",
    "squeue": """
for step in "$STEPS"/*; do
    [[ -f $step ]] || continue
    name=${step##*/} age=0:04
    [[ -e $STEPS.$name.listed ]] && age=1:04
    echo "$age" >>"$STEPS.$name.listed"
    echo "77.$name $name $age"
done
exit 0
""",
    "scancel": """
[[ $1 == --ctld && $(<"$STEPS.${3#77.}.listed") == *1:04* ]] || exit 1 # without: it asks all nodes of the job
kill -TERM "$(<"$STEPS/${3#77.}")"
""",
    "scontrol": """
[[ $1 == show ]] && printf 'node%s\\n' 0 1
[[ $1 == requeue ]] && echo "$2" >>"$REQUEUED"
exit 0
""",
    "sleep": "exec /bin/sleep 0.05",
}


def script(processes=PROCESSES, job=JOB, folder="/shared/runs/a b"):
    return write_script(processes, Path(folder), job, cwd=Path("/shared"))


def test_the_text_is_as_reviewed():
    """To accept a change: write the new text to slurm_golden.sh and read the difference."""
    assert script() == GOLDEN.read_text()


def test_bash_accepts_the_script(tmp_path):
    subprocess.run(["bash", "-n", str(GOLDEN)], check=True, timeout=30)


class Cluster:
    """Runs scripts with programs of Slurm that start the steps here."""

    def __init__(self, folder):
        self.folder, self.requeued = folder, folder / "requeued"
        for name in ("bin", "steps"):
            (folder / name).mkdir()
        for name, text in FAKES.items():
            (folder / "bin" / name).write_text("#!/bin/bash\n" + text)
            (folder / "bin" / name).chmod(0o755)

    def begin(self, processes):
        text = write_script(processes, self.folder, SlurmJob("run", 2, 8, 8), cwd=self.folder)
        (self.folder / "job.sh").write_text(text)
        env = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "REQUEUED": str(self.requeued)}
        env |= {"STEPS": str(self.folder / "steps")}
        env |= {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_ID": "77"}
        return subprocess.Popen(["bash", str(self.folder / "job.sh")], env=env, stdout=subprocess.PIPE, text=True)

    def run(self, processes):
        job = self.begin(processes)
        out, _ = job.communicate(timeout=300)
        return job.returncode, out

    def log(self, name):
        return (self.folder / "workers" / f"{name}.log").read_text()

    @property
    def is_requeued(self):
        return self.requeued.exists() and self.requeued.read_text() == "77\n"


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def trainer(code, **options):
    return Process("trainer", "trainer", ("bash", "-c", code), **options)


ACTOR = Process("actor", "actor", ("bash", "-c", 'echo "$0 $A"; exec /bin/sleep 600', "{host:trainer} it's"), env={"A": "x  y"})


def test_the_job_ends_with_the_trainer_and_ends_the_others(cluster):
    status, _ = cluster.run([trainer("until [ -s workers/actor.log ]; do /bin/sleep 0.01; done"), ACTOR])
    assert (status, cluster.is_requeued) == (0, False)
    assert cluster.log("actor") == "node0 it's x  y\n"


def test_a_step_that_fails_is_restarted_within_its_budget(cluster):
    count = "echo x >>count; [ $(wc -l <count) -ge 3 ]"
    status, out = cluster.run([trainer(count, restarts=2)])
    assert (status, out.count("restart ")) == (0, 2)
    status, out = cluster.run([trainer("exit 9", restarts=2)])
    assert (status, out.count("restart "), cluster.is_requeued) == (9, 2, False)


@pytest.mark.parametrize(("code", "requeued"), [(78, False), (2, False), (143, False), (75, True)])
def test_statuses_decide_about_restart_and_requeue(cluster, code, requeued):
    status, out = cluster.run([trainer(f"exit {code}", restarts=0 if code == 75 else 3)])
    assert (status, cluster.is_requeued) == (code, requeued)
    assert "restart " not in out


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_trainer_saves_before_the_time_limit_and_the_job_is_queued_again(cluster, number, requeued):
    save = "trap 'echo saved; exit 143' TERM; echo ready; while :; do /bin/sleep 0.01; done"
    job = cluster.begin([trainer(save), ACTOR])
    deadline = time.monotonic() + 30
    log = cluster.folder / "workers" / "trainer.log"
    while not (log.exists() and "ready" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.send_signal(number)
    job.communicate(timeout=300)
    assert (job.returncode, cluster.is_requeued) == (143, requeued)
    assert cluster.log("trainer") == "ready\nsaved\n"


def test_restarts_wait_as_those_of_the_supervisor(cluster):
    (cluster.folder / "bin" / "sleep").write_text(f'#!/bin/bash\necho "$1" >>{shlex.quote(str(cluster.folder))}/delays\n')
    cluster.run([trainer("exit 9", restarts=9)])
    budget = RestartBudget(9, 600.0)
    assert [float(delay) for delay in (cluster.folder / "delays").read_text().split()] == [budget.spend(0.0) for _ in range(9)]


def test_a_job_that_is_asked_to_end_waits_for_no_restart(cluster):
    slept = cluster.folder / "slept"
    (cluster.folder / "bin" / "sleep").write_text(f"#!/bin/bash\necho >{shlex.quote(str(slept))}\nexec /bin/sleep 600\n")
    job = cluster.begin([trainer("exit 9")])
    deadline = time.monotonic() + 30
    while not slept.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=300)  # also: the child that slept has ended, or the pipe would be open
    assert (job.returncode, cluster.is_requeued) == (9, False)
    assert out.count("restart ") == 1


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_any_text_is_one_argument_of_bash(text):
    assert shlex.split(_quote(text, {})) == [text]


def test_the_address_of_a_node_is_put_into_an_argument():
    assert _quote("a b{host:t}:80", {"t": 1}) == "'a b'\"${nodes[1]}\":80"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: script(job=SlurmJob("run", 1, 8, 4)), "no node .*has room for trainer1"),
        (lambda: script(PROCESSES[2:]), "no process has the role trainer"),
        (lambda: script(folder="runs/a"), "must be an absolute path"),
        (lambda: script([trainer("x", gpus=0.5)]), "whole ones only"),
        (lambda: SlurmJob("a b", 1, 1), "name of a job"),
        (lambda: SlurmJob("a", 0, 1), r"nodes \(0\) must be at least 1"),
        (lambda: SlurmJob("a", 1, 1, time="soon"), "time limit of Slurm"),
        (lambda: SlurmJob("a", 1, 1, options=("--x\nrm -rf /",)), "must be --NAME=VALUE"),
        (lambda: SlurmJob("a", 1, 1, options=("--nodes=3",)), "none of --nodes"),
    ],
)
def test_a_job_that_cannot_be_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        change()
