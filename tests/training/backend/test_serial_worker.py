"""The thread that runs a backend's operations: in order, and not past a failure."""

import threading
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from training_samples import cpu_config, gradients_of, sorting_items, tiny_model, weights_of

from ludic.errors import BackendStoppedError, NonFiniteError
from ludic.training.backend.serial_worker import SerialWorker
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.presets import make_grpo

KINDS = ("works", "fails", "harmless", "reset")
PROGRAMMES = st.lists(st.sampled_from(KINDS), max_size=12)


def outcome_of(future):
    try:
        return future.wait()
    except Exception as error:
        return type(error)


def expected_outcomes(programme):
    """The rule, one operation at a time: what runs adds its number to the result."""
    executed, stopped, outcomes = [], False, []
    for number, kind in enumerate(programme):
        if kind == "reset":
            stopped, executed = False, []
            outcomes.append(None)
        elif stopped:
            outcomes.append(BackendStoppedError)
        elif kind == "works":
            executed.append(number)
            outcomes.append(tuple(executed))
        else:
            stopped = kind == "fails"
            outcomes.append(KeyError if stopped else NonFiniteError)
    return outcomes, executed


@given(PROGRAMMES)
def test_a_programme_submitted_at_once_equals_its_operations_one_after_the_other(programme):
    worker, executed, begin = SerialWorker(), [], threading.Event()

    def work(number, kind):
        if kind != "works":
            raise KeyError(number) if kind == "fails" else NonFiniteError("not finite")
        executed.append(number)
        return tuple(executed)

    def clear():
        executed.clear()

    futures = [worker.submit("begin", begin.wait)]
    for number, kind in enumerate(programme):
        if kind == "reset":
            futures.append(worker.reset(clear))
        else:
            futures.append(worker.submit(kind, lambda number=number, kind=kind: work(number, kind), harmless=NonFiniteError))
    assert not any(future.done() for future in futures)
    begin.set()
    outcomes = [outcome_of(future) for future in futures[1:]]
    worker.close()
    assert (outcomes, executed) == expected_outcomes(programme)


def test_operations_behind_a_failure_say_what_failed_and_how_to_go_on():
    worker = SerialWorker()
    first, second = worker.submit("forward_backward", lambda: 1 / 0), worker.submit("optim_step", lambda: 1)
    with pytest.raises(ZeroDivisionError):
        first.wait()
    with pytest.raises(BackendStoppedError, match=r"optim_step did not run, .*forward_backward failed.*reset\(\)") as caught:
        second.wait()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert worker.reset().wait() is None
    assert worker.submit("optim_step", lambda: 1).wait() == 1
    worker.close()


def test_every_operation_runs_in_the_same_thread_which_close_ends():
    worker = SerialWorker()
    threads = {worker.submit("work", threading.current_thread).wait() for _ in range(3)}
    [thread] = threads
    assert thread is not threading.current_thread()
    last = worker.submit("work", lambda: 1)
    worker.close()
    assert last.wait() == 1
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="shutdown"):
        worker.submit("work", lambda: 1)


def test_an_operation_cannot_wait_for_itself():
    worker = SerialWorker()
    with pytest.raises(RuntimeError, match="inner was submitted from inside another operation"):
        worker.submit("outer", lambda: worker.submit("inner", lambda: 1).wait()).wait()
    worker.close()


ALGO = make_grpo(group_size=4)
BACKEND_KINDS = ("forward_backward", "overflow", "broken", "optim_step", "reset")
BATCHES = [sorting_items(4, seed=seed) for seed in range(2)]


def mini_batch_of(items):
    cfg = cpu_config()
    return MiniBatch(MacroBatch.ingest(items, cfg.max_seq_len), np.arange(len(items)), cfg)


def batch_of(kind, number):
    """A mini-batch; `overflow` makes the loss infinite, `broken` fails in the model's forward
    pass."""
    mini_batch = mini_batch_of(BATCHES[number % 2])
    micro_batches = list(mini_batch)
    if kind == "overflow":
        micro_batches[0].tensors["weight"] = micro_batches[0].tensors["weight"] + torch.inf
    if kind == "broken":
        del micro_batches[-1].tensors["attention_mask"]
    return micro_batches, mini_batch.totals


def start(backend, kind, number):
    if kind == "reset":
        return backend.reset()
    if kind == "optim_step":
        return backend.optim_step(lr_factor=1 / (1 + number))
    micro_batches, totals = batch_of(kind, number)
    return backend.forward_backward(micro_batches, totals=totals)


def value_of(future):
    result = outcome_of(future)
    return float(result.loss) if hasattr(result, "loss") else result


def run_one_by_one(backend, programme):
    """The rule on a backend that computes when it is called."""
    outcomes, stopped = [], False
    for number, kind in enumerate(programme):
        if stopped and kind != "reset":
            outcomes.append(BackendStoppedError)
            continue
        outcomes.append(value_of(start(backend, kind, number)))
        stopped = isinstance(outcomes[-1], type) and outcomes[-1] is not NonFiniteError
    return outcomes


@settings(max_examples=settings.default.max_examples // 8)
@given(st.lists(st.sampled_from(BACKEND_KINDS), max_size=8))
def test_a_backend_with_a_worker_ends_with_the_bits_of_one_without(programme):
    worker = SerialWorker()
    inline, threaded = (TorchBackend(tiny_model(), cpu_config(), algo=ALGO, worker=each) for each in (None, worker))
    expected = run_one_by_one(inline, programme)
    futures = [start(threaded, kind, number) for number, kind in enumerate(programme)]
    outcomes = [value_of(future) for future in futures]
    worker.close()
    np.testing.assert_equal(outcomes, expected)
    for read in (weights_of, gradients_of):
        left, right = ({name: value.numpy() for name, value in read(backend.model).items()} for backend in (threaded, inline))
        np.testing.assert_equal(left, right)  # nan equals nan


def test_a_nonfinite_step_does_not_stop_the_backend():
    worker = SerialWorker()
    backend = TorchBackend(tiny_model(), cpu_config(), algo=ALGO, worker=worker)
    before, numbers = weights_of(backend.model), count()
    kinds = ("overflow", "optim_step", "forward_backward", "optim_step")
    futures = [start(backend, kind, next(numbers)) for kind in kinds]
    with pytest.raises(NonFiniteError, match="No weight was changed"):
        futures[1].wait()
    assert futures[3].wait()["grad_norm"] > 0
    assert any((before[name] != weight).any() for name, weight in weights_of(backend.model).items())
    worker.close()
