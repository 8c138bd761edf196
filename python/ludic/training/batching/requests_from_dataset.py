"""The documented path of `ludic.training.rollouts.requests`."""

from ludic.errors import RequestsExhausted
from ludic.training.rollouts.requests import (
    make_dataset_queue_requests_fn,
    make_dataset_sequence_requests_fn,
    make_requests_fn_from_queue,
)

__all__ = [
    "RequestsExhausted",
    "make_dataset_queue_requests_fn",
    "make_dataset_sequence_requests_fn",
    "make_requests_fn_from_queue",
]
