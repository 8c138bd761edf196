"""Pushes that bring nothing new: what is served already is called by their version, and too many
of them in a row are an error."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ludic.errors import PublishError

logger = logging.getLogger(__name__)

MOST_IN_A_ROW = 20
"""Pushes of unchanged weights before they are an error. Batches without a gradient are not
counted where the trainer says so."""


class UnchangedWeights:
    """What was published last, by its fingerprints.

    >>> unchanged = UnchangedWeights("weights")
    >>> if not unchanged.are(marks, version=17):
    ...     unchanged.forget()  # until the push has succeeded, nobody knows what is served
    ...     push()
    >>> unchanged.published(marks, version=17)
    """

    def __init__(self, what: str, *, allowed: bool = False) -> None:
        """`what` is their name in messages. `allowed`: they are pushed like any others."""
        self.what = what
        self.allowed = allowed
        self.change_expected = True
        """Whether there was a gradient since the last push; a publisher that is not told
        supposes so."""
        self._last: tuple[str, dict[str, str]] | None = None
        self._in_a_row = 0

    def are(self, marks: Mapping[str, str], version: str | int | None, *, dtype: str = "dtype") -> bool:
        """Whether these are the weights of the last push under another version, with a warning;
        `dtype` is what they are published in.
        Under the same version, as after a resume, they are published again.

        Raises PublishError where that is so for the twentieth time in a row: nothing that is
        trained arrives.
        """
        if self.allowed or self._last is None:
            return False
        earlier, same = self._last
        if str(version) == earlier:
            return False
        if marks != same:
            self._in_a_row = 0
            return False
        self._in_a_row += self.change_expected
        if self._in_a_row >= MOST_IN_A_ROW:
            raise PublishError(
                f"{self._in_a_row} pushes in a row, up to version {version}, brought the {self.what} of the one before, in the server's "
                f"{dtype} too: is the published model the one that is trained, is the learning rate so small that the dtype loses its "
                "steps, did the gradient vanish? allow_unchanged=True publishes them all the same"
            )
        why = (
            "nothing was learnt since"
            if not self.change_expected
            else f"{self._in_a_row} of at most {MOST_IN_A_ROW - 1} in a row"
        )
        logger.warning(
            "the %s of version %s are those of version %s, which is served on under the new number (%s)",
            self.what,
            version,
            earlier,
            why,
        )
        return True

    def published(self, marks: Mapping[str, str], version: str | int | None) -> None:
        """Take note of what is served now."""
        self._last = (str(version), dict(marks))

    def forget(self) -> None:
        """The next push is made whatever it brings."""
        self._last = None
