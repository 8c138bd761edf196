"""One grader process for all tests of this folder, because starting one takes a second."""

from collections.abc import Iterator

import pytest

from ludic.envs.maths import MathGrader


@pytest.fixture(scope="package")
def grader() -> Iterator[MathGrader]:
    grader = MathGrader(timeout_s=30.0, workers=1)
    yield grader
    grader.close()
