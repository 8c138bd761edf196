"""Writes a Slurm batch script for the processes of a run: text in, text out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ludic.errors import DO_NOT_RETRY, TRY_AGAIN, ConfigError, check_value
from ludic.launch.process import HOST, USAGE, Process, check_processes
from ludic.launch.rank_environment import STOP_ONCE
from ludic.launch.slurm.settings import check_time
from ludic.launch.slurm.steps import YOUNG_S
from ludic.launch.supervisor import LONGEST_DELAY_S, POLITE, WINDOW_S

_LINE = re.compile(r"[^\n\r\0]+")
_RESERVED = ("--nodes", "--signal", "--open-mode", "--job-name", "--output")


@dataclass(frozen=True)
class SlurmJob:
    """The allocation of a run."""

    name: str
    nodes: int
    cpus_per_node: int
    gpus_per_node: int = 0
    time: str = "24:00:00"
    """The time limit of one attempt; a requeued job has it again."""
    notice_s: int = 120
    """How long before the time limit the trainer is asked to save and end."""
    python: str = "python"
    """The interpreter on the nodes, such as `/shared/env/bin/python`."""
    options: tuple[str, ...] = ()
    """More options of sbatch, such as `--partition=gpu` and `--account=lab`."""

    def __post_init__(self) -> None:
        for name in ("nodes", "cpus_per_node", "notice_s"):
            check_value(name, getattr(self, name), least=1)
        check_value("gpus_per_node", self.gpus_per_node, least=0)
        check_time(self.time)
        for option in self.options:
            if not (option.startswith("--") and _LINE.fullmatch(option)) or option.split("=")[0] in _RESERVED:
                raise ConfigError(f"option of sbatch ({option!r}) must be --NAME=VALUE, and none of {', '.join(_RESERVED)}")
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.name):
            raise ConfigError(f"name of a job ({self.name!r}) must consist of letters, digits, `_`, `.` and `-`")


def write_script(processes: Sequence[Process], folder: Path, job: SlurmJob, *, cwd: Path) -> str:
    """The text of the script, to be written to a file and passed to `sbatch`.

    Each process is a job step on the node that has room for it, in the order of the list. It is
    restarted as the `Supervisor` does it: `Process.restarts` times, not after the statuses 0, 2 and
    78. When all of the role `trainer` have ended, the others are ended. `notice_s` before the time
    limit the trainer gets SIGTERM; it saves and ends, and the job is queued again, as it is if the
    trainer ends with status 75. The processes resume from the newest checkpoint by themselves.

    `folder`, the run's, and `cwd` must be absolute and on a file system that all nodes share.
    Raises ConfigError if the processes do not fit on the nodes.
    """
    check_processes(list(processes))
    for label, path in (("folder", folder), ("cwd", cwd)):
        if not path.is_absolute() or not _LINE.fullmatch(str(path)):
            raise ConfigError(f"{label} ({path}) must be an absolute path on a file system that all nodes share")
    if not any(process.is_trainer for process in processes):
        raise ConfigError("no process has the role trainer, so the job would have no end")
    nodes = assign_nodes(processes, job)
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.cpus_per_node}",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        f"--time={job.time}",
        f"--output={shlex.quote(str(folder / 'slurm-%j.log'))}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{job.notice_s}",
        *job.options,
    ]
    steps = "\n\n".join(_write_step(process, folder, job, nodes) for process in processes)
    return _SCRIPT.format(
        header="\n".join(f"#SBATCH {option}" for option in options),
        cwd=shlex.quote(str(cwd)),
        logs=shlex.quote(str(folder / "workers")),
        window=int(WINDOW_S),
        longest=int(LONGEST_DELAY_S),
        final=f"0 | {USAGE} | {DO_NOT_RETRY}",
        polite=" | ".join(str(int(status)) for status in POLITE),
        retry=TRY_AGAIN,
        stop=DO_NOT_RETRY,
        steps=steps,
        stop_once=STOP_ONCE,
        young=YOUNG_S - 1,
    )


def assign_nodes(processes: Sequence[Process], job: SlurmJob) -> dict[str, int]:
    """Process -> the first node, 0 to `job.nodes` - 1, with cores and GPUs left for it."""
    cpus, gpus = [float(job.cpus_per_node)] * job.nodes, [float(job.gpus_per_node)] * job.nodes
    assigned = {}
    for process in processes:
        if process.gpus != int(process.gpus) or process.cpus != int(process.cpus):
            raise ConfigError(f"{process.name} needs {process.cpus:g} CPUs and {process.gpus:g} GPUs; Slurm has whole ones only")
        wanted = max(1.0, process.cpus)
        fitting = [node for node in range(job.nodes) if cpus[node] >= wanted and gpus[node] >= process.gpus]
        if not fitting:
            each = f"{job.cpus_per_node} CPUs and {job.gpus_per_node} GPUs"
            raise ConfigError(
                f"no node of {job.nodes} with {each} has room for {process.name} ({wanted:g} CPUs, {process.gpus:g} GPUs) after the others"
            )
        node = assigned[process.name] = fitting[0]
        cpus[node] -= wanted
        gpus[node] -= process.gpus
    return assigned


def _write_step(process: Process, folder: Path, job: SlurmJob, nodes: Mapping[str, int]) -> str:
    """The lines that start a process and keep it running."""
    log = shlex.quote(str(folder / "workers" / f"{process.name}.log"))
    srun = ["srun", "--nodes=1", "--ntasks=1", "--exact", f'--nodelist="${{nodes[{nodes[process.name]}]}}"']
    srun += [f"--cpus-per-task={max(1, int(process.cpus))}", *([f"--gpus={int(process.gpus)}"] if process.gpus else [])]
    srun += ["--kill-on-bad-exit=1", "--unbuffered", f"--job-name={process.name}", f"--output={log}", "--open-mode=append"]
    variables = [shlex.quote(f"{name}={value}") for name, value in process.env.items()]
    first = [job.python, *process.argv[1:]] if process.argv[0] == "python" else list(process.argv)
    command = [*(["env", *variables] if variables else []), *(_quote(part, nodes) for part in first)]
    kind = "trainers" if process.is_trainer else "others"
    lines = [f"keep {process.name} {process.restarts} {kind}", " ".join(srun), " ".join(command) + " &"]
    return " \\\n    ".join(lines) + f"\n{kind}+=($!)"


def _quote(part: str, nodes: Mapping[str, int]) -> str:
    """An argument for bash. `a{host:t} b` becomes `a"${nodes[0]}"' b'` if t is on node 0."""
    texts = HOST.split(part)  # text, name, text, name, ..., text
    words = [f'"${{nodes[{nodes[text]}]}}"' if odd % 2 else shlex.quote(text) if text else "" for odd, text in enumerate(texts)]
    return "".join(words) or "''"


_SCRIPT = """\
#!/bin/bash
{header}

# Written by ludic. Each process of the run is a job step, restarted while it may be; the job ends
# with the trainer. It is queued again before its time limit, and if the trainer ends with {retry}.
set -u
export {stop_once}=1 # a step's SIGTERM reaches agents and their ranks
cd {cwd} || exit 78
mkdir -p {logs} || exit 78
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

ask() {{ # NAME PID: SIGTERM for the step of that name; one for srun itself would kill the step
    local step age
    while # a step is listed before its process has begun, which would miss the signal
        read -r step age < <(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j %M' |
            awk -v name="$1" '$2 == name {{ print $1, $3 }}')
        [[ $age == 0:0[0-{young}] ]]
    do sleep 1; done
    # Through the controller: scancel itself asks all nodes of the job, and fails where the step is not.
    if [[ -z $step ]] || ! scancel --ctld --signal=TERM "$step"; then
        kill -TERM "$2" 2>/dev/null # there is no step yet
    fi
}}

keep() {{ # NAME RESTARTS KIND COMMAND...: run the command, again while it fails
    local name=$1 restarts=$2 kind=$3 used=0 began status child= asked=0 interrupted=0
    shift 3
    trap 'asked=1 interrupted=1; [[ -n $child ]] && ask "$name" "$child"' TERM
    while ((!asked)); do
        began=$SECONDS
        "$@" &
        child=$!
        ((asked)) && ask "$name" "$child" # it was asked before it ran
        while :; do # a signal interrupts `wait`
            interrupted=0
            wait "$child"
            status=$?
            ((interrupted)) || break
        done
        child=
        case $status in {final}) break ;; esac
        if [[ $kind == trainers ]]; then
            case $status in {polite}) break ;; esac
        fi
        ((asked)) && break
        ((SECONDS - began >= {window})) && used=0
        ((used++ < restarts)) || break
        echo "$(date -Is) $name ended with status $status; restart $used of $restarts"
        sleep $((used > 6 ? {longest} : (1 << used) / 4)) & # 0 1 2 4 ...; TERM interrupts only `wait`
        child=$!
        ((asked)) && kill -TERM "$child"
        wait "$child"
        child=
    done
    echo "$(date -Is) $name ended with status ${{status-143}} and is not restarted"
    exit "${{status-143}}"
}}

trainers=() others=()
{steps}

again=0 interrupted=0
stop() {{ # ask the trainers to save and end
    interrupted=1
    kill -TERM "${{trainers[@]}}" 2>/dev/null
}}
trap 'again=1; stop' USR1 # the time limit is near
trap stop TERM INT

status=0
for pid in "${{trainers[@]}}"; do
    while :; do
        interrupted=0
        wait "$pid"
        code=$?
        ((interrupted)) || break
    done
    ((code > status)) && status=$code
done
if ((${{#others[@]}})); then
    kill -TERM "${{others[@]}}" 2>/dev/null
    wait "${{others[@]}}"
fi
if ((status == {retry} || (again && status != 0 && status != {stop}))); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
