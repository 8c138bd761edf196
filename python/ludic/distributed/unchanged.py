"""Handles pushes of unchanged weights: only the version that the servers report changes, and too
many such pushes in a row are an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from ludic.errors import PublishError
from ludic.inference.publishing import Version

logger = logging.getLogger(__name__)

MOST_IN_A_ROW = 20
"""This many pushes of unchanged weights in a row are an error. Batches without a gradient do not
count, if the trainer reports them."""


class UnchangedWeights:
    """Decides for each push whether the weights have to be sent, by comparing their fingerprints
    with those of the previous push.

    >>> unchanged = UnchangedWeights("weights")
    >>> unchanged.publish(fingerprints, 17, push=push, rename=rename, still_served=lambda: True)
    """

    def __init__(self, what: str, *, allowed: bool = False, resent: bool = False) -> None:
        """`what` names the weights in messages. `allowed`: push unchanged weights like any
        others. `resent`: the messages say that `rename` sends the weights again."""
        self.what = what
        self.resent = resent
        self.allowed = allowed
        self.change_expected = True
        """Whether there was a gradient since the last push. True unless the trainer reports
        otherwise."""
        self._last: tuple[str, dict[str, str]] | None = None
        self._in_a_row = 0

    def publish(
        self,
        fingerprints: Mapping[str, str],
        version: Version,
        *,
        push: Callable[[], None],
        rename: Callable[[], None],
        still_served: Callable[[], bool],
        dtype: str = "dtype",
    ) -> None:
        """Call `rename` if these are the weights of the last push and the servers still have them,
        else `push`.

        After a failed push, `push` is always called, because it is not known what is served.
        `dtype` is the dtype of the published weights, for the message.
        """
        if self.is_repeat(fingerprints, version, dtype=dtype) and still_served():
            rename()
        else:
            self._last = None
            push()
        self._last = (str(version), dict(fingerprints))

    def is_repeat(self, fingerprints: Mapping[str, str], version: Version, *, dtype: str = "dtype") -> bool:
        """Whether these are the weights of the last push under another version; logs a warning if
        so. Under the same version, as after a resume, they are published again.

        Raises PublishError when this happens for the twentieth time in a row, not counting batches
        without a gradient: the trained weights do not reach the servers.
        """
        if self.allowed or self._last is None:
            return False
        last_version, last_fingerprints = self._last
        if str(version) == last_version:
            return False
        if fingerprints != last_fingerprints:
            self._in_a_row = 0
            return False
        self._in_a_row += self.change_expected
        if self._in_a_row >= MOST_IN_A_ROW:
            raise PublishError(
                f"{self._in_a_row} pushes in a row, up to version {version}, did not change the {self.what} in the server's {dtype}: is "
                "the published model the one that is trained, is the learning rate so small that the dtype rounds its steps away, did the "
                "gradient vanish? allow_unchanged=True publishes them anyway"
            )
        logger.warning(
            "the %s of version %s equal those of version %s; the servers %s version %s (%s)",
            self.what,
            version,
            last_version,
            "are sent them again, as" if self.resent else "keep them and report",
            version,
            f"{self._in_a_row} of at most {MOST_IN_A_ROW - 1} in a row"
            if self.change_expected
            else "there was no gradient since",
        )
        return True
