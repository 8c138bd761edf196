"""Runs coroutines from synchronous code and synchronous calls in threads, awaits results of users'
functions, and runs users' coroutines so that their failures stay contained, whatever they raise,
and even if they ignore cancellation. `TrainFuture` is the result of an operation that may still be
running."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from ludic.errors import RolloutError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EventLoop:
    """Runs coroutines one after another on the same event loop, so that clients that are bound to a
    loop can be used in every step. The loop is made at the first call and closed with this
    object."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def run(self, coroutine: Coroutine[Any, Any, T], *, instead: str) -> T:
        """Run the coroutine and return its result. Raises RuntimeError inside a running loop; the
        message names `instead`, which can be awaited there."""
        if _is_running():
            coroutine.close()
            raise RuntimeError(f"an event loop is running already, and a second cannot run inside it; use `await {instead}`")
        if self._runner is None:
            self._runner = asyncio.Runner()
            weakref.finalize(self, _close, self._runner)
        return self._runner.run(coroutine)


def _close(runner: asyncio.Runner) -> None:
    if _is_running():  # garbage-collected while another loop runs, so this one cannot be run any more
        runner.get_loop().close()
    else:
        runner.close()


def call_outside_loop(call: Callable[[], T], *, on_interrupt: Callable[[], None]) -> T:
    """Return `call()`, which may run an event loop: in a thread, if one is running here already, as
    in a notebook. The first Ctrl-C then calls `on_interrupt`, which has the call end, and waits for
    it; the second is raised, while the thread ends by itself."""
    if not _is_running():
        return call()
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ludic-run")
    try:
        result = executor.submit(copy_context().run, call)
        try:
            return result.result()
        except KeyboardInterrupt:
            if result.done():
                raise
            on_interrupt()
            return result.result()
    finally:
        executor.shutdown(wait=False)


def _is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def await_if_needed(value: Any) -> Any:
    """`value`, or its result if it is awaitable. For what a user's plain or coroutine function
    returned."""
    return await value if inspect.isawaitable(value) else value


def is_being_cancelled() -> bool:
    """Whether the current task is being cancelled; True outside a task."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end. If the caller is cancelled meanwhile, that is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.exception()  # retrieved, so that the loop does not report it if a cancellation is raised instead
    if cancelled is not None:
        raise cancelled
    return task.result()


async def run_in_thread(compute: Callable[..., T], *args: object) -> T:
    """Return `compute(*args)`, run in a thread that ends with the call. Like `asyncio.to_thread`:
    the number of threads is limited, a call that waits for a thread can be cancelled, and closing
    the loop waits for running calls.

    When the thread ends, so do the OpenMP workers that torch made for it. If they stayed, libgomp
    would count more threads than cores and let the workers of the training thread sleep whenever
    they wait. On two idle cores that makes the forward and backward passes of a small model 1.5
    times as slow.
    """
    return await asyncio.to_thread(_run_in_new_thread, compute, *args)


def _run_in_new_thread(compute: Callable[..., T], *args: object) -> T:
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="ludic-local") as executor:
        return executor.submit(copy_context().run, compute, *args).result()


def start_in_thread(call: Callable[[], T], *, name: str, daemon: bool = False, future: Future[T] | None = None) -> Future[T]:
    """Start a call in its own thread. Only the call's own deadline ends it; the process waits for
    it before it ends, unless it is a `daemon`. A `future` that is given can be cancelled until the
    call begins."""
    future = Future() if future is None else future

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return future


async def run_in_daemon_thread(call: Callable[[], T], *, name: str) -> T:
    """Return `call()`, run in a daemon thread that is abandoned when the caller is cancelled.

    It does not use the loop's thread pool, because a few hanging calls would exhaust it, and the
    interpreter would wait for them at exit.
    """
    loop, context, done = asyncio.get_running_loop(), copy_context(), asyncio.Event()

    def tell(_: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nothing waits
            loop.call_soon_threadsafe(done.set)

    outcome = start_in_thread(lambda: context.run(call), name=name, daemon=True)
    outcome.add_done_callback(tell)
    await done.wait()
    return outcome.result()


STOP_TIMEOUT_S = 30.0
"""How long cancelled code may take to end before it is closed by force."""


async def run_contained(work: Coroutine[Any, Any, T], *, what: str, timeout_s: float | None = None) -> T:
    """Await `work` in its own task and return its result. `what` names it in errors.

    Raises the Exception that `work` raises, and TimeoutError after `timeout_s`. SystemExit, other
    BaseExceptions, and the cancellation of something that `work` awaits become a RolloutError,
    because they would end the program or be lost. KeyboardInterrupt is raised unchanged.

    `work` is cancelled at the deadline, and when the caller is cancelled. If it ignores that, it is
    closed STOP_TIMEOUT_S later, with a warning. Neither code that blocks the event loop nor tasks
    that `work` starts can be stopped.
    """
    task = asyncio.create_task(_result_or_error(work, what))
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # else asyncio logs it as never retrieved
    try:
        await asyncio.wait([task], timeout=timeout_s)
        late = not task.done()
    finally:
        if not task.done():
            await _stop(task, what)
    if late:
        raise TimeoutError(f"{what} took longer than {timeout_s} s")
    if task.cancelled():
        raise RolloutError(f"{what} cancelled itself")
    value, error = task.result()
    del task  # breaks a reference cycle: task, error, traceback, this frame
    try:
        if error is not None:
            raise error
        return value  # type: ignore[return-value]
    finally:
        del error


async def _result_or_error(work: Coroutine[Any, Any, T], what: str) -> tuple[T | None, Exception | None]:
    """(result, None) of `work`, or (None, error). The error is returned because a task that raises
    SystemExit would stop the event loop."""
    try:
        return await work, None
    except KeyboardInterrupt:
        raise
    except asyncio.CancelledError as cancelled:
        if is_being_cancelled():
            raise
        return None, _set_cause(RolloutError(f"something that {what} waited for was cancelled"), cancelled)
    except Exception as error:
        return None, error
    except BaseException as error:
        return None, _set_cause(RolloutError(f"{what} raised {describe_error(error)}"), error)


def _set_cause(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


async def _stop(task: asyncio.Task[Any], what: str) -> None:
    """Cancel the task, wait, and close it by force if it still runs. Does not wait if the caller is
    cancelled again."""
    task.cancel()
    try:
        await asyncio.wait([task], timeout=STOP_TIMEOUT_S)
    finally:
        if not task.done():
            logger.warning("%s ignored its cancellation and is closed by force", what)
            coroutine: Any = task.get_coro()
            coroutine.close()  # the task has nothing left to run
            task.cancel()


def describe_error(error: BaseException | None) -> str:
    """Type and message of an error, even if its `__str__` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose message cannot be shown"


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
