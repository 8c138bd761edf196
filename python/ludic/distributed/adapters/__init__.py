"""Publishers for the inference engines that we know."""

from ludic.distributed.adapters.local import LocalPublisher

__all__ = ["LocalPublisher"]
