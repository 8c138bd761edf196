"""Models in this process: a chat client that samples, and a reward model that scores."""

from ludic.inference.local.client import LocalChatClient
from ludic.inference.local.reward import LocalRewardModel

__all__ = ["LocalChatClient", "LocalRewardModel"]
