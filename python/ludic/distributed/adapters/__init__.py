"""Publishers for the inference engines that we know."""

from ludic.distributed.adapters.local import LocalPublisher
from ludic.distributed.adapters.reward_model import RMPublisherAdapter, create_rm_publisher

__all__ = ["LocalPublisher", "RMPublisherAdapter", "create_rm_publisher"]
