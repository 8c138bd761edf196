"""Joining ranks, and which errors come from other ranks; without a process group."""

import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from free_ports import free_port
from torch.distributed import TCPStore

from ludic.errors import ConfigError, RankError
from ludic.launch.rank_environment import RankEnvironment
from ludic.training import ranks
from ludic.training.ranks import rank_store, rendezvous, session
from ludic.training.ranks.rendezvous import Rendezvous

PACKAGE = Path(__file__).parents[3] / "python" / "ludic"


@pytest.fixture
def two(monkeypatch):
    """The meetings of two ranks; this process is rank 0."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)
    meetings = [Rendezvous(store.clone(), rank, 2) for rank in range(2)]
    monkeypatch.setattr(session, "_rendezvous", meetings[0])
    monkeypatch.setattr(rendezvous, "REPLY_S", 0.05)
    yield meetings
    del store  # which serves the others


def test_no_collective_pickles():
    calls = re.compile(r"\b(all_gather|gather|scatter|broadcast|send|recv)_object(_list)?\b")
    assert [str(path) for path in PACKAGE.rglob("*.py") if calls.search(path.read_text(encoding="utf-8"))] == []


def test_one_process_joins_nobody(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert ranks.start() is None
    with ranks.joined() as environment:
        assert environment is None
        assert ranks.current_rendezvous() is None
    error = ValueError("own")
    assert ranks.explain(error) is error
    ranks.raise_if_failed()
    ranks.stop()


def test_an_own_error_is_told_to_the_others(two):
    error = ValueError("no reward")
    assert ranks.explain(error) is error
    failure = two[1].find_failure()
    assert (failure.rank, failure.text) == (0, "ValueError: no reward")


def test_an_error_that_another_rank_caused_is_replaced_by_its(two):
    two[1].report_failure(two[1].describe(OSError("the disk is full")))
    explained = ranks.explain(RuntimeError("gloo: connection closed by peer"))
    assert isinstance(explained, RankError)
    assert "failed on rank 1 of 2" in str(explained)
    assert "the disk is full" in str(explained)
    with pytest.raises(RankError, match="the disk is full"):
        ranks.raise_if_failed()


def test_an_own_error_stays_when_another_rank_has_already_ended_because_of_it(two, monkeypatch):
    error = ValueError("no reward")
    echo = two[0].describe(error).to_error("writing", 2)
    two[1].report_failure(two[1].describe(echo))  # rank 1 read it in an agreement, and was faster
    assert ranks.explain(error) is error
    environment = RankEnvironment(0, 2, 0, "127.0.0.1", 1, has_store=True)
    monkeypatch.setattr(session, "start", lambda *_, **__: environment)
    with pytest.raises(ValueError, match="no reward") as raised, ranks.joined(environment):
        raise error
    assert raised.value.__cause__ is None


def test_a_collective_that_fails_without_a_word_names_the_silent_rank(two):
    try:
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:4000")
    except RuntimeError as closed:
        wrapped = KeyError("while it was handled")
        wrapped.__context__ = closed
    explained = ranks.explain(wrapped)
    assert "no sign from rank 1 of 2" in str(explained)
    assert ranks.explain(explained) is explained
    assert two[1].find_failure().rank == 0


@pytest.mark.parametrize(
    ("error", "is_collective"),
    [
        (dist.DistBackendError("x"), True),
        (RuntimeError("NCCL error: unhandled system error"), True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc] Timed out waiting 1000ms for recv operation"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("the gloomy gloo"), False),
    ],
)
def test_errors_of_collectives_are_recognised(error, is_collective):
    assert session._comes_from_collective(error) is is_collective


def test_the_store_listens_at_its_address_alone_and_a_port_in_use_is_named():
    descriptor = rank_store._listen(RankEnvironment(0, 2, 0, "127.0.0.1", 0))
    with socket.socket(fileno=descriptor) as listening:
        host, port = listening.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(RankError, match=rf"port {port}, .*at 127.0.0.1:{port}, is in use"):
            rank_store._listen(RankEnvironment(0, 2, 0, "127.0.0.1", port))


def test_a_store_that_is_not_there_is_named_at_the_deadline():
    port = free_port()
    with pytest.raises(RankError, match=rf"rank 1 of 2 .*127.0.0.1:{port} within 0.2 s"):
        rank_store.open_store(RankEnvironment(1, 2, 1, "127.0.0.1", port), 0.2)


def test_a_store_of_several_agents_is_refused_before_anything_is_written_to_it():
    environment = RankEnvironment(1, 2, 0, "127.0.0.1", 1, has_store=True, num_machines=2)
    with pytest.raises(ConfigError, match=r"torchrun on 2 machines .*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        ranks.start(environment, rendezvous_timeout_s=0.1)
    assert ranks.current_rendezvous() is None


@pytest.mark.parametrize(("has_store", "name"), [(True, "2"), (False, "0")])
def test_ranks_meet_whatever_their_agents_have_counted_if_rank_0_serves_a_new_store(has_store, name):
    environment = RankEnvironment(1, 2, 0, "127.0.0.1", 1, has_store=has_store, attempt="2")
    assert session._name_attempt(environment) == name


def test_more_ranks_than_gpus_on_a_machine_are_refused(monkeypatch):
    monkeypatch.setattr(session.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(session.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"local rank 2 .*GPU .*has 2"):
        session._choose_device(RankEnvironment(2, 4, 2, "127.0.0.1", 0))


def test_a_process_group_of_the_user_has_one_meeting_at_its_store_as_long_as_it_lives(monkeypatch, tmp_path):
    monkeypatch.setattr(session, "is_distributed", lambda: dist.is_initialized())
    seen = []
    for name in ("first", "second"):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / name}", rank=0, world_size=1)
        shared = ranks.current_rendezvous()
        assert ranks.current_rendezvous() is shared
        with ranks.rank_0_alone("measuring") as values:
            values.append(name)
        assert values == [name]
        seen.append(shared)
        dist.destroy_process_group()
    assert seen[0] is not seen[1]
    assert ranks.current_rendezvous() is None


AFTER_THE_GROUP = """
import gc, sys, time
from pathlib import Path
import torch.distributed as dist
from ludic.training import ranks

def gloo_threads():
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
deadline = time.monotonic() + 60
while not gloo_threads() and time.monotonic() < deadline:  # a thread names itself once it runs
    time.sleep(0.01)
during = gloo_threads()
import torch.distributed._shard.sharded_tensor  # what `save_pretrained` imports
dist.destroy_process_group()
gc.collect()
print(during > 0, gloo_threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to list the threads of a process")
def test_a_destroyed_process_group_leaves_no_threads_which_could_abort_the_process_at_its_end(tmp_path):
    command = [sys.executable, "-c", AFTER_THE_GROUP, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout.split() == ["True", "0"]
