"""Models in this process: a chat client that samples, and a reward model that scores."""

from ludic.inference.local.client import LocalChatClient as LocalChatClient
from ludic.inference.local.reward import LocalRewardModel as LocalRewardModel
