"""Calls of a log are repeated where waiting can help, and only there."""

import pytest

from ludic.errors import OwnershipLost, QueueDataLost, QueueError, QueueRefused
from ludic.training.queue.opening import QueueRetryPolicy


class Calls:
    """Raises `errors` one after the other, then returns 7; time passes while it is waited."""

    def __init__(self, *errors):
        self.errors, self.now_s = list(errors), 0.0

    def __call__(self):
        if self.errors:
            raise self.errors.pop(0)
        return 7

    async def sleep(self, seconds):
        self.now_s += seconds

    async def answer(self):
        async def run(operation):
            return operation()

        return await QueueRetryPolicy(60.0, sleep=self.sleep, clock=lambda: self.now_s, run=run).call("reading", self)


async def test_a_call_is_repeated_while_the_queue_cannot_be_reached():
    calls = Calls(QueueError("unreachable"), QueueError("full"))
    assert await calls.answer() == 7
    assert calls.now_s > 0


@pytest.mark.parametrize("error", [QueueRefused("wrong password"), QueueDataLost("gone"), OwnershipLost("another")])
async def test_what_does_not_pass_by_itself_is_raised_at_once(error):
    calls = Calls(error)
    with pytest.raises(type(error)) as caught:
        await calls.answer()
    assert caught.value is error
    assert calls.now_s == 0
