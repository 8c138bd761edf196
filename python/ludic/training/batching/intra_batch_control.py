"""The documented path of `ludic.training.rollouts.request_groups`."""

from ludic.training.rollouts.request_groups import GRPORequestStrategy, IdentityStrategy, RequestStrategy

__all__ = ["GRPORequestStrategy", "IdentityStrategy", "RequestStrategy"]
