"""Where a trainer's operations run: in its thread, in another one, or in the backend's worker."""

import threading

import pytest
from training_samples import ListSource, assert_same_tensors, cpu_config, sorting_items, tiny_model, weights_of

from ludic.inference.client import Publisher
from ludic.training import CheckpointConfig, TorchBackend, Trainer, make_grpo
from ludic.training.backend.serial_worker import SerialWorker

ALGO = make_grpo(group_size=4)


class OverlappingSource(ListSource):
    overlaps = True


class FolderPublisher:
    """Has the backend write the weights itself."""

    needs_weights = False

    def __init__(self, backend, folder):
        self.backend, self.folder, self.given = backend, folder, []

    async def publish(self, state_dict, version=None):
        self.given.append((dict(state_dict), version))
        await self.backend.save(self.folder / str(version), optimizer=False)


def make_trainer(folder, *, worker=None, overlaps=False, **options):
    backend = TorchBackend(tiny_model(), cpu_config(), algo=ALGO, worker=worker)
    source = (OverlappingSource if overlaps else ListSource)(sorting_items(8), sorting_items(8, seed=1))
    config = CheckpointConfig(folder, every_n_steps=1)
    publisher = FolderPublisher(backend, folder / "published")
    return Trainer(
        model=backend.model,
        algo=ALGO,
        batch_source=source,
        cfg=cpu_config(),
        backend=backend,
        checkpoint_config=config,
        publisher=publisher,
        **options,
    )


def record_threads(backend):
    """The threads in which the backend's optimizer steps."""
    threads, step = [], backend.optimizer.step
    backend.optimizer.step = lambda: (threads.append(threading.current_thread()), step())[1]
    return threads


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_run_with_a_worker_ends_with_the_bits_of_one_without(tmp_path, overlaps):
    worker = SerialWorker()
    plain = make_trainer(tmp_path / "plain", overlaps=overlaps)
    threaded = make_trainer(tmp_path / "threaded", worker=worker, overlaps=overlaps)
    used = record_threads(threaded.backend)
    for trainer in (plain, threaded):
        trainer.train_sync(2)
    assert_same_tensors(weights_of(threaded.model), weights_of(plain.model))
    for name in ("model.safetensors", "optimizer.safetensors", "optimizer.json"):
        files = [tmp_path / run / "step_000002" / name for run in ("plain", "threaded")]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert {thread.name for thread in used} == {"ludic-backend_0"}
    worker.close()


def test_a_backend_with_a_worker_is_called_in_the_trainers_thread(tmp_path):
    called = {}
    for name, worker in (("without", None), ("with", SerialWorker())):
        trainer = make_trainer(tmp_path / name, worker=worker, overlaps=True)
        step, threads = trainer.backend.optim_step, called.setdefault(name, [])
        trainer.backend.optim_step = lambda step=step, threads=threads, **options: (
            threads.append(threading.current_thread() is threading.main_thread()),
            step(**options),
        )[1]
        trainer.train_sync(1)
    assert called == {"without": [False], "with": [True]}


def test_a_publisher_that_needs_no_weights_gets_none(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.backend.export_weights = None  # nobody may call it
    trainer.train_sync(2)
    assert trainer.publisher.given == [({}, 1), ({}, 2)]
    assert (tmp_path / "published" / "2" / "model.safetensors").exists()


def test_publishers_need_weights_unless_they_say_otherwise():
    assert Publisher.needs_weights


def test_a_failed_save_of_the_worker_is_raised_and_says_which(tmp_path):
    worker = SerialWorker()
    trainer = make_trainer(tmp_path, worker=worker)
    trainer.train_sync(1)
    (tmp_path / "published" / "2").write_text("a file where the folder should be")
    with pytest.raises(FileExistsError):
        trainer.train_sync(1)
    worker.close()
