"""`SerialWorker`: one thread that runs a backend's operations in the order in which they were
submitted.

    submit forward_backward   submit optim_step   await both
    thread:   forward_backward ----------> optim_step ------->

Submitting several operations before awaiting any of them gives the same as one after the other. The
event loop is free meanwhile. An operation that fails takes those behind it along, because they were
submitted for a state that does not exist: an optimizer step on half a gradient would be wrong and
silent. `reset` ends that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ludic.errors import BackendStoppedError
from ludic.event_loop import TrainFuture

T = TypeVar("T")


class SerialWorker:
    """One thread with a queue of operations.

    >>> worker = SerialWorker()
    >>> first = worker.submit("forward_backward", lambda: 1)
    >>> second = worker.submit("optim_step", lambda: 2)
    >>> second.wait(), first.done()
    (2, True)
    >>> worker.close()

    The first failure is raised by its own future. Operations submitted after it raise
    BackendStoppedError, with that failure as the cause, and do not run, until one that was
    submitted with `reset`.
    """

    def __init__(self) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None  # of this thread
        self._failure: tuple[str, BaseException] | None = None
        """The operation that failed, and its error. Only the worker's thread uses it."""
        self._thread: int | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ludic-backend", initializer=self._begin, initargs=(device,))

    def _begin(self, device: int | None) -> None:
        self._thread = threading.get_ident()
        if device is not None:
            torch.cuda.set_device(device)

    def submit(
        self, operation: str, compute: Callable[[], T], *, harmless: type[Exception] | tuple[type[Exception], ...] = ()
    ) -> TrainFuture[T]:
        """Run `compute` after everything that was submitted before. An error of a `harmless` type
        is raised by the future, and later operations run all the same. Raises RuntimeError after
        `close`, and inside an operation, which would wait for itself."""
        future = TrainFuture[T](operation)
        self._enqueue(operation, lambda: self._run(future, compute, harmless))
        return future

    def reset(self, clear: Callable[[], None] = lambda: None) -> TrainFuture[None]:
        """Run `clear` in its turn, whatever has failed before; operations submitted from now on run
        again."""
        future = TrainFuture[None]("reset")

        def run() -> None:
            self._failure = None
            self._run(future, clear, ())

        self._enqueue("reset", run)
        return future

    @property
    def has_failed(self) -> bool:
        """Whether an operation failed and nothing runs until `reset`."""
        return self._failure is not None

    def close(self) -> None:
        """Wait for what was submitted, and end the thread."""
        self._executor.shutdown()

    def _enqueue(self, operation: str, run: Callable[[], None]) -> None:
        if threading.get_ident() == self._thread:
            raise RuntimeError(f"{operation} was submitted from inside another operation of this backend")
        self._executor.submit(run)

    def _run(
        self, future: TrainFuture[T], compute: Callable[[], T], harmless: type[Exception] | tuple[type[Exception], ...]
    ) -> None:
        if self._failure is not None:
            failed, cause = self._failure
            stopped = BackendStoppedError(
                f"{future.operation} did not run, because {failed} failed before it ({type(cause).__name__}: {cause}); call reset() on the "
                "backend, which drops the gradient, to go on from the weights of the last optimizer step, or load a checkpoint after that"
            )
            stopped.__cause__ = cause
            future.set_exception(stopped)
            return
        try:
            result = compute()
        except BaseException as error:
            if not isinstance(error, harmless):
                self._failure = future.operation, error
            future.set_exception(error)
        else:
            future.set_result(result)
