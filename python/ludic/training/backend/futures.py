"""The result of an operation of a training backend, which may still be running.

Await it directly, `await backend.forward_backward(batch).result()`, or keep it, do other work, and
await it later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class TrainFuture(Generic[T]):
    """The result of one operation. Set once, from any thread; awaited any number of times, in any
    event loop. `await future` and `await future.result()` are the same.

    >>> future = TrainFuture[int]("optim_step")
    >>> future.set_result(3)
    >>> future.done()
    True
    """

    def __init__(self, operation: str = "") -> None:
        self.operation = operation
        """The name of the operation, for logs and errors."""
        self._future: Future[T] = Future()
        self._future.set_running_or_notify_cancel()  # cancelling one waiter does not cancel it for the others

    @classmethod
    def of(cls, operation: str, compute: Callable[[], T]) -> TrainFuture[T]:
        """Call `compute` now. The future has its result or its exception."""
        future = TrainFuture[T](operation)
        try:
            future.set_result(compute())
        except Exception as error:
            future.set_exception(error)
        return future

    def done(self) -> bool:
        return self._future.done()

    def set_result(self, value: T) -> None:
        """Make `result` and `wait` return `value`, which may be None. Raises InvalidStateError if
        the future is done."""
        self._future.set_result(value)

    def set_exception(self, error: BaseException) -> None:
        """Make `result` and `wait` raise `error`."""
        self._future.set_exception(error)

    async def result(self) -> T:
        """Wait for the operation. Returns its result or raises its error."""
        return self._future.result() if self.done() else await asyncio.wrap_future(self._future)

    def __await__(self) -> Generator[Any, Any, T]:
        return self.result().__await__()

    def wait(self) -> T:
        """`result` for synchronous code: blocks the thread until the operation is done."""
        return self._future.result()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.operation}, {'done' if self.done() else 'pending'})"


class ImmediateTrainFuture(TrainFuture[T]):
    """A future that is done: the answer of a backend that computes when it is called.

    >>> ImmediateTrainFuture({"loss": 0.5}, "forward_backward").wait()
    {'loss': 0.5}
    """

    def __init__(self, value: T, operation: str = "") -> None:
        super().__init__(operation)
        self.set_result(value)


async def wait_all(futures: Iterable[TrainFuture[T]]) -> list[T]:
    """The results, in the order of `futures`. Waits until all are done, and then raises the error
    of the first that failed."""
    waited = list(futures)
    await asyncio.gather(*(future.result() for future in waited), return_exceptions=True)
    return [future.wait() for future in waited]
