"""Parts of messages that documents name, so that user code may look for them."""

import re

import pytest

from ludic.envs.code_exec.backend import parse_backend
from ludic.errors import ConfigError
from ludic.inference.extensions import VLLMExtensions
from ludic.inference.vllm.requests import extension_fields
from ludic.parsers import xml_parser
from ludic.training import CISPOLoss, ClippedSurrogateLoss, GRPORequestStrategy, Reducer, SAWBatch, make_grpo
from ludic.training.algorithm import drop_zero_weight_samples, filter_zero_variance_groups
from ludic.training.credit_assignment import EpisodicReturn, GroupNormalizedReturn, HybridNormalizedReturn
from ludic.training.reducers import apply_reducers_to_records

EMPTY = SAWBatch(items=[], meta={})


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: xml_parser("answer", kind="outer"), "Unknown kind"),
        (lambda: parse_backend("qemu"), "Unknown backend"),
        (lambda: GRPORequestStrategy(group_size=0), "group_size must be positive"),
        (lambda: EpisodicReturn(group_size=-1), "group_size must be positive"),
        (lambda: GroupNormalizedReturn(group_size=0), "group_size must be positive"),
        (lambda: HybridNormalizedReturn(group_size=0), "group_size must be positive"),
        (lambda: make_grpo(group_size=0), "group_size must be positive"),
        (lambda: ClippedSurrogateLoss(clip_eps_low=-0.1), "clip_eps_low must be non-negative"),
        (lambda: CISPOLoss(clip_eps_high=-0.1), "clip_eps_high must be non-negative"),
        (lambda: drop_zero_weight_samples(EMPTY, eps=-1.0), "eps must be >= 0"),
        (lambda: filter_zero_variance_groups(EMPTY, eps=float("nan")), "eps must be >= 0"),
        (lambda: extension_fields(VLLMExtensions(max_think=0)), "max_think must be a positive integer"),
        (lambda: extension_fields(VLLMExtensions(repetition_penalty=0.0)), "repetition_penalty must be > 0"),
    ],
)
def test_the_message_has_the_documented_part(call, part):
    with pytest.raises(ConfigError, match=re.escape(part)):
        call()


def test_a_reducer_of_an_unknown_kind_is_refused_when_it_is_applied():
    reducer = Reducer("median", "score")
    with pytest.raises(ConfigError, match=r"reducer loss: kind \(median\)"):
        apply_reducers_to_records([{"score": 1.0}], {"loss": reducer})
