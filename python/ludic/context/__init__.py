"""Contexts, which decide which messages of an episode the model sees."""

from ludic.context.strategies import ContextStrategy, FullDialog, GivenDialog, TruncatedThinkingContext

__all__ = ["ContextStrategy", "FullDialog", "GivenDialog", "TruncatedThinkingContext"]
