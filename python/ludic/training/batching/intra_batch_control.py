"""The documented path of `ludic.training.rollouts.groups`."""

from ludic.training.rollouts.groups import GRPORequestStrategy, IdentityStrategy, RequestStrategy

__all__ = ["GRPORequestStrategy", "IdentityStrategy", "RequestStrategy"]
