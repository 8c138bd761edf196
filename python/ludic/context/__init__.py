"""Contexts, which decide which messages of an episode the model sees."""

from ludic.context.base import ContextStrategy
from ludic.context.full_dialog import FullDialog, GivenDialog
from ludic.context.truncated_thinking import TruncatedThinkingContext

__all__ = ["ContextStrategy", "FullDialog", "GivenDialog", "TruncatedThinkingContext"]
