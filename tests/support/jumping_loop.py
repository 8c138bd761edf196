"""An event loop whose clock stands still while anything can run, and jumps to the next deadline
when nothing can."""

import asyncio


class JumpingLoop(asyncio.SelectorEventLoop):
    """Deadlines pass at once and only where something hangs, however busy the machine is. Not
    for work in threads or sockets."""

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
    """`asyncio.run` on such a loop."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(awaitable)
