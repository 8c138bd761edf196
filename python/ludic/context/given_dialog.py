"""A dialogue that begins with messages of the environment's."""

from __future__ import annotations

from ludic.context.full_dialog import FullDialog


class GivenDialog(FullDialog):
    """`FullDialog` by another name, for code that says that its environments give the messages
    which the dialogue begins with."""
