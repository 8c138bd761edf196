"""A name of `FullDialog` for dialogues that the environment starts."""

from __future__ import annotations

from ludic.context.full_dialog import FullDialog


class GivenDialog(FullDialog):
    """The same as `FullDialog`. The name says that the environment starts the dialogue with several
    messages."""
