#!/bin/bash
#SBATCH --job-name=run
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00
#SBATCH --output='/shared/runs/a b/slurm-%j.log'
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --partition=gpu

# Written by ludic. Each process of the run is a job step, restarted while it may be; the job ends
# with the trainer. It is queued again before its time limit, and if the trainer ends with 75.
set -u
export LUDIC_STOP_ONCE=1 # a step's SIGTERM reaches agents and their ranks
cd /shared || exit 78
mkdir -p '/shared/runs/a b/workers' || exit 78
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

ask() { # NAME PID: SIGTERM for the step of that name; one for srun itself would kill the step
    local step age
    while # a step is listed before its process has begun, which would miss the signal
        read -r step age < <(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j %M' |
            awk -v name="$1" '$2 == name { print $1, $3 }')
        [[ $age == 0:0[0-4] ]]
    do sleep 1; done
    # Through the controller: scancel itself asks all nodes of the job, and fails where the step is not.
    if [[ -z $step ]] || ! scancel --ctld --signal=TERM "$step"; then
        kill -TERM "$2" 2>/dev/null # there is no step yet
    fi
}

keep() { # NAME RESTARTS KIND COMMAND...: run the command, again while it fails
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
        case $status in 0 | 2 | 78) break ;; esac
        if [[ $kind == trainers ]]; then
            case $status in 130 | 143) break ;; esac
        fi
        ((asked)) && break
        ((SECONDS - began >= 600)) && used=0
        ((used++ < restarts)) || break
        echo "$(date -Is) $name ended with status $status; restart $used of $restarts"
        sleep $((used > 6 ? 30 : (1 << used) / 4)) & # 0 1 2 4 ...; TERM interrupts only `wait`
        child=$!
        ((asked)) && kill -TERM "$child"
        wait "$child"
        child=
    done
    echo "$(date -Is) $name ended with status ${status-143} and is not restarted"
    exit "${status-143}"
}

trainers=() others=()
keep trainer0 2 trainers \
    srun --nodes=1 --ntasks=1 --exact --nodelist="${nodes[0]}" --cpus-per-task=4 --gpus=4 --kill-on-bad-exit=1 --unbuffered --job-name=trainer0 --output='/shared/runs/a b/workers/trainer0.log' --open-mode=append \
    /env/bin/python -m train --at="${nodes[0]}":80 &
trainers+=($!)

keep trainer1 2 trainers \
    srun --nodes=1 --ntasks=1 --exact --nodelist="${nodes[1]}" --cpus-per-task=4 --gpus=4 --kill-on-bad-exit=1 --unbuffered --job-name=trainer1 --output='/shared/runs/a b/workers/trainer1.log' --open-mode=append \
    /env/bin/python -m train --at="${nodes[0]}":80 &
trainers+=($!)

keep actor0 3 others \
    srun --nodes=1 --ntasks=1 --exact --nodelist="${nodes[0]}" --cpus-per-task=4 --kill-on-bad-exit=1 --unbuffered --job-name=actor0 --output='/shared/runs/a b/workers/actor0.log' --open-mode=append \
    env 'A=x y' /env/bin/python -m act 'it'"'"'s' &
others+=($!)

again=0 interrupted=0
stop() { # ask the trainers to save and end
    interrupted=1
    kill -TERM "${trainers[@]}" 2>/dev/null
}
trap 'again=1; stop' USR1 # the time limit is near
trap stop TERM INT

status=0
for pid in "${trainers[@]}"; do
    while :; do
        interrupted=0
        wait "$pid"
        code=$?
        ((interrupted)) || break
    done
    ((code > status)) && status=$code
done
if ((${#others[@]})); then
    kill -TERM "${others[@]}" 2>/dev/null
    wait "${others[@]}"
fi
if ((status == 75 || (again && status != 0 && status != 78))); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
