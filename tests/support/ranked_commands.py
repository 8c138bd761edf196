"""`ludic` on several ranks, each in a process forked from a server that has imported everything.
The environment of each is that of torchrun without its agent: rank 0 serves the store."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from forkserver import FORKSERVER
from free_ports import free_port
from tiny_recipe import TINY

from ludic.launch.rank_environment import RankEnvironment

PATIENCE_S = 600.0
NETWORK = [argument for argument in TINY if argument.startswith("network.")]
PAIRS = [*NETWORK, "threads=1", "pairs=40", "task.args.num_heldout=40", "batch_size=6", "epochs=1"]
REWARD = ["reward=byte_rewards:mean_id", "task.args.max_new_tokens=4", "task.args.num_heldout=3"]


class Ranks:
    """Processes that run `work(environment, *arguments)`, one for each rank; `ludic_command` by
    default.

    Their output is in `folder`: `rank_0.out`, `rank_0.err` and so on.
    """

    def __init__(self, folder, world_size, *arguments, work=None):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        port = free_port()
        self.processes = []
        for rank in range(world_size):
            environment = RankEnvironment(rank, world_size, rank, "127.0.0.1", port)
            process = FORKSERVER.Process(target=_run, args=(work or ludic_command, environment, str(folder), arguments))
            process.start()
            self.processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def wait(self, timeout_s=PATIENCE_S):
        """The exit statuses, by rank. Fails if one does not end."""
        ends = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(timeout=max(0.0, ends - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        assert None not in codes, f"{codes}\n{self.read_all()}"
        return codes

    def kill(self, rank, signum=signal.SIGKILL):
        os.kill(self.processes[rank].pid, signum)

    def wait_for(self, condition, timeout_s=PATIENCE_S):
        """Wait until `condition()` is true, while all ranks live."""
        ends = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < ends, f"waited {timeout_s} s\n{self.read_all()}"
            assert all(process.is_alive() for process in self.processes), self.read_all()
            time.sleep(0.01)

    def read(self, rank, stream):
        return (self.folder / f"rank_{rank}.{stream}").read_text()

    def read_all(self):
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("rank_*.*")))


def ludic_command(environment, *arguments):
    """`ludic ARGUMENTS...` on this rank."""
    from ludic.cli.app import main

    sys.argv = ["ludic", *arguments]
    main()


def with_sgd(environment, *arguments):
    """`ludic ARGUMENTS...` with plain gradient descent: AdamW would magnify the last digit of a
    gradient near zero."""
    import torch

    from ludic.training import trainer
    from ludic.training.backend import torch as backend

    def build_sgd(model, cfg):
        return torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)

    trainer.build_optimizer = backend.build_optimizer = build_sgd  # of the policy, and of a critic
    ludic_command(environment, *arguments)


def in_slices(environment, *arguments):
    """`with_sgd`, which must train on slices of rows."""
    from ludic.models.context_parallel import RowSlice

    to_tokens, widths = RowSlice.to_tokens, []

    def note(self, attended):
        if attended.requires_grad:
            widths.append(self.width < self.tokens)
        return to_tokens(self, attended)

    RowSlice.to_tokens = note
    try:
        with_sgd(environment, *arguments)
    finally:
        assert widths, "no row was computed in slices"
        assert all(widths)


def killed_before_step_4(environment, *arguments):
    """`with_sgd`, where rank 1 gets SIGKILL as soon as it begins step 4."""
    signal_before_step(environment, 4, 1, signal.SIGKILL)
    with_sgd(environment, *arguments)


def signal_before_step(environment, step, rank, signum):
    """One rank sends itself a signal as soon as it begins this step: at the same moment, however
    busy the machine is."""
    from ludic.training import Trainer

    train_step = Trainer.train_step

    async def train_until_then(self):
        if environment.rank == rank and self.current_step == step - 1:
            os.kill(os.getpid(), signum)
        return await train_step(self)

    Trainer.train_step = train_until_then


def copied_before_step_3(environment, *arguments):
    """`with_sgd`. Where step 3 begins, rank 0 copies the run's folder to `NAME-at-2`: what a kill
    would leave."""
    from ludic.training import Trainer

    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    run, train_step = Path(given["output"]) / given["name"], Trainer.train_step

    async def copy_first(self):
        if environment.rank == 0 and self.current_step == 2:
            shutil.copytree(run, run.with_name(f"{run.name}-at-2"))
        return await train_step(self)

    Trainer.train_step = copy_first
    with_sgd(environment, *arguments)


def alone(environment, *arguments):
    """`with_sgd` in one process."""
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    with_sgd(environment, *arguments)


def largest_difference(first: Path, second: Path) -> float:
    """Of the weights of two runs, relative to the largest weight. (A bias of the keys has the
    gradient 0, and is rounding alone.)"""
    from safetensors.torch import load_file

    one, other = (load_file(run / "model" / "model.safetensors") for run in (first, second))
    assert one.keys() == other.keys()
    difference = max(float((one[name] - other[name]).abs().max()) for name in one)
    return difference / max(float(tensor.abs().max()) for tensor in one.values())


def metrics_of(run: Path):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def has_steps(run: Path, steps: int):
    """Whether the run has logged so many steps."""
    log = run / "metrics.jsonl"
    return lambda: log.is_file() and log.read_text().count("train/loss") >= steps


def _run(work, environment, folder, arguments):
    for stream, name in ((1, "out"), (2, "err")):
        target = os.open(os.path.join(folder, f"rank_{environment.rank}.{name}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, stream)
    os.environ |= {
        "RANK": str(environment.rank),
        "WORLD_SIZE": str(environment.world_size),
        "LOCAL_RANK": str(environment.local_rank),
        "MASTER_ADDR": environment.address,
        "MASTER_PORT": str(environment.port),
        "OMP_NUM_THREADS": "1",
    }
    import torch

    torch.set_num_threads(1)
    code = 1
    try:
        work(environment, *arguments)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
