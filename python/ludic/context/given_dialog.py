"""A dialogue that starts with messages of the environment."""

from __future__ import annotations

from ludic.context.full_dialog import FullDialog


class GivenDialog(FullDialog):
    """The same as `FullDialog`, under a name that tells that the environment starts the
    dialogue."""
