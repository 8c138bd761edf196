"""Errors of rank 0 on other ranks."""

from ludic.errors import DataError, InferenceError, RequestsExhausted
from ludic.training.ranks.sent_errors import describe_error, rebuild_error


def test_an_error_is_rebuilt_as_its_nearest_class_that_takes_a_message():
    class OutOfGames(RequestsExhausted):
        pass

    class NeedsMore(InferenceError):
        def __init__(self, message, *, status):
            super().__init__(message)

    for error, kind in (
        (OutOfGames("none"), RequestsExhausted),
        (NeedsMore("none", status=3), InferenceError),
        (DataError("none"), DataError),
        (StopAsyncIteration("none"), StopAsyncIteration),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "none"), UnicodeError),
    ):
        rebuilt = rebuild_error(describe_error(error))
        assert type(rebuilt) is kind
        assert str(rebuilt) == str(error)
        assert rebuilt.__notes__[0].startswith("raised by rank 0, on ")
    unknown = rebuild_error(describe_error(KeyboardInterrupt()))
    assert str(unknown).endswith("was interrupted (without a message)")
