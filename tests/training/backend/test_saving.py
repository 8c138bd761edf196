"""Folders that ranks write together, with ranks as threads that meet at a real store."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from ludic.errors import CheckpointError, RankError
from ludic.files.atomic import unfinished_path
from ludic.training.backend import saving
from ludic.training.ranks.rendezvous import Rendezvous

PATIENCE_S = 10.0


@pytest.fixture
def on_two_ranks(monkeypatch):
    """Calls a function on both ranks; returns its error on each, and their meetings."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=PATIENCE_S), wait_for_workers=False)
    meetings = [Rendezvous(store.clone(), rank, 2) for rank in range(2)]
    here = threading.local()
    told, both = {}, threading.Barrier(2, timeout=PATIENCE_S)

    def gather_json(value):
        told[here.rank] = value
        both.wait()
        return [told[0], told[1]]

    together = SimpleNamespace(
        rank=lambda: here.rank, gather_json=gather_json, agree=lambda doing: meetings[here.rank].agree(doing, PATIENCE_S)
    )
    monkeypatch.setattr(saving, "ranks", together)
    errors = [None, None]

    def run(rank, work):
        here.rank = rank
        try:
            work(together)
        except Exception as error:
            errors[rank] = error

    def call(work):
        threads = [threading.Thread(target=run, args=(rank, work), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=3 * PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)
        return errors, meetings

    yield call
    del store  # which serves the others


def save(target):
    """Save as a checkpoint is saved: `write` has an agreement of its own."""

    def work(ranks):
        def write(folder):
            with ranks.agree("saving a sharded model"):
                pass
            (folder / f"model-{ranks.rank() + 1:05d}-of-00002.safetensors.txt").write_text("weights")

        with ranks.agree("saving the checkpoint of step 1"), saving.replace_folder_together(target, write):
            pass

    return work


def test_both_ranks_write_into_one_folder(on_two_ranks, tmp_path):
    errors, _ = on_two_ranks(save(tmp_path / "step_000001"))
    assert errors == [None, None]
    assert len(list((tmp_path / "step_000001").iterdir())) == 2


def test_a_folder_that_one_rank_does_not_see_is_told_to_all_and_they_stay_together(on_two_ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "unfinished_path", lambda target: unfinished_path(tmp_path / "elsewhere" / target.name))
    errors, meetings = on_two_ranks(save(tmp_path / "step_000001"))
    assert isinstance(errors[1], CheckpointError)
    assert "rank 1 does not see" in str(errors[1])
    assert isinstance(errors[0], RankError)
    assert "rank 1 does not see" in str(errors[0])
    assert meetings[0]._number == meetings[1]._number  # neither waits in an agreement that the other never comes to
    assert list(tmp_path.iterdir()) == []
