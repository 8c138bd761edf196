"""An event loop with a virtual clock. Time stands still while a callback is ready and jumps to the
next timer when none is."""

import asyncio


class JumpingLoop(asyncio.SelectorEventLoop):
    """Timeouts fire immediately, and only where something really hangs, however busy the machine
    is. Not suitable for work in threads or on sockets."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def time(self):
        return self.now

    def _run_once(self):
        due = [timer.when() for timer in self._scheduled if not timer.cancelled()]
        if not self._ready and due:
            self.now = max(self.now, min(due))
        super()._run_once()


def play_jumping(awaitable):
    """`asyncio.run` on a `JumpingLoop`."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(awaitable)
