"""A real Slurm of one machine for tests: Debian's packages in a private root over this machine's,
in memory. Nothing that is installed or started there touches the machine, and all ends with it.

It needs Linux, root and Debian's archive; where one is missing, tests that ask for it are skipped.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from free_ports import free_ports

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
DEADLINE_S = 120
_ROOT = """
set -e
mount -t tmpfs -o size=2g tmpfs "$1"
mkdir "$1/up" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/up,workdir=$1/work" "$1/root"
mount -t proc proc "$1/root/proc"
mount --rbind /dev "$1/root/dev"
mount --rbind /sys "$1/root/sys"
mount -t tmpfs tmpfs "$1/root/run"
mount --bind "$2" "$1/root$2"
echo ready
exec chroot "$1/root" sleep infinity
"""
_INSTALL = f"""
printf '#!/bin/sh\\nexit 101\\n' >/usr/sbin/policy-rc.d
chmod +x /usr/sbin/policy-rc.d
export DEBIAN_FRONTEND=noninteractive
command -v slurmctld || apt-get install -y --no-install-recommends {" ".join(PACKAGES)} ||
    {{ apt-get update && apt-get install -y --no-install-recommends {" ".join(PACKAGES)}; }}
"""
_START = """
set -e
host=$(hostname -s)
mkdir -p /run/munge /var/log/munge /var/lib/munge /etc/slurm /var/spool/slurmctld /var/log/slurm
head -c 1024 /dev/urandom >/etc/munge/munge.key
chown munge: /etc/munge/munge.key /run/munge /var/log/munge /var/lib/munge
chmod 400 /etc/munge/munge.key
chmod 755 /run/munge
su munge -s /bin/sh -c 'munged --force'
cat >/etc/slurm/slurm.conf <<C
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$3
SlurmUser=root
SlurmdParameters=config_overrides
AuthType=auth/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
SlurmctldLogFile=/var/log/slurm/ctld.log
SlurmdLogFile=/var/log/slurm/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
GresTypes=gpu
MpiDefault=none
ReturnToService=2
InactiveLimit=0
KillWait=5
C
for i in $(seq "$1"); do
    echo "NodeName=n$i NodeHostname=$host NodeAddr=127.0.0.1 Port=$(($3 + i)) CPUs=4 Gres=gpu:$2 State=UNKNOWN" >>/etc/slurm/slurm.conf
    for g in $(seq 0 $(($2 - 1))); do touch "/run/gpu$g"; echo "NodeName=n$i Name=gpu File=/run/gpu$g"; done >>/etc/slurm/gres.conf
    echo "127.0.0.1 n$i" >>/etc/hosts
    mkdir -p "/var/spool/slurmd-n$i"
done
echo "PartitionName=all Nodes=n[1-$1] Default=YES State=UP OverSubscribe=YES" >>/etc/slurm/slurm.conf
slurmctld
for i in $(seq "$1"); do slurmd -N "n$i"; done
"""


class SlurmCluster:
    """Nodes n1, n2, ... which are all this machine, with made-up GPUs."""

    def __init__(self, pid: int, shared: Path) -> None:
        self._pid = pid
        self.shared = shared
        """A folder that the cluster sees too."""

    def run(self, *command: str, env: dict[str, str] | None = None, timeout: float = DEADLINE_S) -> str:
        """What a command prints that runs in the shared folder, seen from a node."""
        inside = ["nsenter", "-t", str(self._pid), "-m", "-p", "-u", "-r", "--", "env", "-C", str(self.shared)]
        variables = [f"{name}={value}" for name, value in (env or {}).items()]
        done = subprocess.run([*inside, *variables, *command], capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    def start(self, nodes: int, gpus: int) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        self.run("bash", "-c", _START, "start", str(nodes), str(gpus), str(free_ports(1 + nodes)))
        wait_until(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D") == str(nodes), "nodes are idle")

    def submit(self, script: str, **env: str) -> str:
        return self.run("sbatch", "--parsable", "--export=ALL", script, env=env)

    def wait(self, job: str) -> int:
        """The exit status of a job that has ended."""
        wait_until(
            lambda: self.state(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"), f"job {job} ends"
        )
        return int(self.state(job)["ExitCode"].partition(":")[0])

    def state(self, job: str) -> dict[str, str]:
        pairs = (part.partition("=") for part in self.run("scontrol", "-o", "show", "job", job).split(" "))
        return {key: value for key, _, value in pairs}

    def processes(self) -> str:
        """The command lines of all processes of the cluster."""
        return self.run("ps", "-ewwo", "args")


def wait_until(holds, what: str, deadline_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < deadline, f"after {deadline_s} s not yet: {what}"
        time.sleep(0.1)


@contextmanager
def slurm_cluster_or_skip(folder: Path, *, nodes: int, gpus: int):
    """A running cluster, with `folder / "shared"` in it."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a Slurm of one's own needs Linux and root")
    if missing := [name for name in ("unshare", "nsenter", "apt-get") if shutil.which(name) is None]:
        pytest.skip(f"a Slurm of one's own needs {', '.join(missing)}")
    memory, shared = folder / "memory", folder / "shared"
    memory.mkdir()
    shared.mkdir()
    unshare = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
    outer = subprocess.Popen(
        [*unshare, "bash", "-c", _ROOT, "root", str(memory), str(shared)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if outer.stdout is None or outer.stdout.readline() != "ready\n":
            pytest.skip(f"no root of one's own can be made here: {outer.communicate(timeout=30)[1].strip()}")
        inner = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()[0]
        cluster = SlurmCluster(int(inner), shared)
        try:
            cluster.run("bash", "-c", _INSTALL, timeout=600)
        except AssertionError as error:
            pytest.skip(f"Debian's Slurm cannot be installed: {str(error)[-300:]}")
        cluster.start(nodes, gpus)
        yield cluster
    finally:
        outer.send_signal(signal.SIGKILL)  # and with it every process of the cluster
        outer.communicate(timeout=30)
