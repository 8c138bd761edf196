"""Models in this process: an engine that samples, and one that scores with a reward model."""

from ludic.inference.local.client import LocalChatClient
from ludic.inference.local.reward import LocalRewardModel

__all__ = ["LocalChatClient", "LocalRewardModel"]
