"""Groups of samples in a saved state.

The state of a pool has its kept groups with their members. Members of complete groups are saved as
one list, `partial_samples`, in the order in which the groups arrived; all else is the `ledger`:

    {"partial_samples": [<2 samples of group 4>, <2 of group 3>],
     "ledger": {"arrivals": [4, 3],
                "groups": [{"ordinal": 3}, {"ordinal": 4}, {"ordinal": 5, "members": ...}]}}

A state without a ledger has complete samples in `partial_samples` and nothing that was being
generated.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ludic.errors import ConfigError, DataError
from ludic.rollouts.training.packed_columns import COLUMNS
from ludic.rollouts.training.samples import check_sample
from ludic.rollouts.training.types import RolloutConfig, Sample, SampleStatus
from ludic.training.rollouts.group_ledger import FORMAT, MemberCodec, check_number, damaged
from ludic.types import is_list_of

logger = logging.getLogger(__name__)

Member = Sample | list[Sample]
"""What a pool plays in one call: a sample, or with `group_calls` all samples of a group."""


class SampleCodec(MemberCodec):
    """Samples as JSON values, with packed columns."""

    def __init__(self, samples_per_member: int | None) -> None:
        """`samples_per_member`: the length of a member that is a list; None for one sample."""
        self._samples_per_member = samples_per_member

    def encode(self, member: Member) -> Any:
        return [_encode_sample(sample) for sample in members_samples(member)]

    def decode(self, value: Any) -> Member:
        if not isinstance(value, list):
            raise DataError(f"{value!r:.100} is no list of samples")
        samples = [_decode_sample(data) for data in value]
        if len(samples) != (self._samples_per_member or 1):
            raise ConfigError(
                f"saved groups have {len(samples)} samples, not {self._samples_per_member or 1}; set n_samples_per_prompt back"
            )
        return samples[0] if self._samples_per_member is None else samples


def _encode_sample(sample: Sample) -> dict[str, Any]:
    """The sample as JSON values. Raises DataError if it holds what JSON has no form for."""
    try:
        data = sample.to_dict(packed=True)
        json.dumps({name: value for name, value in data.items() if name not in COLUMNS})
    except Exception as error:  # of the user's own objects too, which are copied
        raise DataError(f"the prompt, reward and metadata of sample {sample.index} must be JSON values: {error}") from error
    return data


def _decode_sample(data: Any) -> Sample:
    """The sample of `_encode_sample`. Raises DataError if it is another thing."""
    known = {one.name for one in fields(Sample)}
    if not isinstance(data, Mapping) or not known - {"reward"} <= set(data) <= known:
        raise DataError(f"{data!r:.100} has not the fields of a sample")
    sample = Sample.from_dict(data)
    texts_and_facts = isinstance(sample.response, str) and isinstance(sample.metadata, dict)
    if not texts_and_facts or not is_list_of([sample.index, sample.group_index], int):
        raise DataError("response must be text, metadata a mapping, and index and group_index whole numbers")
    if sample.status is not SampleStatus.ABORTED:
        check_sample(sample)
    return sample


def members_samples(member: Member) -> list[Sample]:
    """The samples of a member, in a list."""
    return member if isinstance(member, list) else [member]


def split_state(pool_state: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(partial samples, ledger) of a pool's state."""
    groups = {group["ordinal"]: dict(group) for group in pool_state["groups"]}
    partial = []
    for ordinal in pool_state["arrivals"]:
        members = groups[ordinal].pop("members")
        partial += [data for number in sorted(members, key=int) for data in members[number]]
    return partial, {**pool_state, "groups": list(groups.values())}


def join_state(partial: Any, ledger: Any, samples_per_group: int) -> dict[str, Any]:
    """The pool's state of `split_state`. Raises ConfigError if the groups have another size, or if
    the two do not belong together; a pool checks all else."""
    if not isinstance(partial, list) or not isinstance(ledger, Mapping):
        raise damaged("partial_samples must be a list, and ledger a mapping")
    arrivals, groups, number = (ledger.get(key) for key in ("arrivals", "groups", "members_per_group"))
    if not isinstance(arrivals, list) or not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise damaged("arrivals and groups of the ledger must be lists, the latter of mappings")
    for ordinal in arrivals:
        check_number("an ordinal of arrivals", ordinal)
    if len(partial) != len(arrivals) * samples_per_group:
        raise ConfigError(
            f"n_samples_per_prompt ({samples_per_group}) must be as saved: {len(partial)} samples in {len(arrivals)} groups"
        )
    number = check_number("members_per_group", number, least=1, most=samples_per_group)
    members = {}
    for i, ordinal in enumerate(arrivals):
        members[ordinal] = _members(partial[i * samples_per_group : (i + 1) * samples_per_group], number)
    for group in groups:
        check_number("the ordinal of a group", group.get("ordinal"))
        if ("members" in group) == (group["ordinal"] in members):
            raise damaged(f"group {group['ordinal']} must have its members either in partial_samples or in the ledger")
    return {**ledger, "groups": [{"members": members.get(group["ordinal"]), **group} for group in groups]}


def state_of_samples(samples: Sequence[Sample], config: RolloutConfig, *, step_count: int) -> dict[str, Any]:
    """The state of a pool that holds these samples as arrived groups and nothing else. Samples of a
    group that is not complete are dropped, with a warning."""
    samples_per_group = config.n_samples_per_prompt
    members_per_group = 1 if config.group_calls else samples_per_group
    complete = _complete_groups(samples, samples_per_group)
    first = step_count * config.batch_size  # as if each batch before had taken the groups that it gave
    groups = []
    for ordinal, group in enumerate(complete, first):
        for member, sample in enumerate(group):
            sample.group_index, sample.index = ordinal, ordinal * samples_per_group + member
        encoded = [_encode_sample(sample) for sample in group]
        groups.append(
            {"ordinal": ordinal, "position": -1, "admitted": step_count, "members": _members(encoded, members_per_group)}
        )
    return {
        "format": FORMAT,
        "batch": step_count,
        "members_per_group": members_per_group,
        "next_ordinal": first + len(complete),
        "counts": {"given": first, "rejected": 0, "lost": 0, "retried": 0},
        "groups": groups,
        "arrivals": [group["ordinal"] for group in groups],
    }


def _members(encoded: Sequence[Any], members_per_group: int) -> dict[str, list[Any]]:
    """The encoded samples of a group by member. Example: 4 samples are 4 members of one, or 1
    member of four."""
    size = len(encoded) // members_per_group
    return {str(i): list(encoded[i * size : (i + 1) * size]) for i in range(members_per_group)}


def _complete_groups(samples: Sequence[Sample], samples_per_group: int) -> list[list[Sample]]:
    groups: dict[Any, list[Sample]] = {}
    for place, sample in enumerate(samples):
        alone = sample.group_index is None or samples_per_group == 1
        groups.setdefault(("alone", place) if alone else sample.group_index, []).append(sample)
    complete = [group for group in groups.values() if len(group) == samples_per_group]
    dropped = len(samples) - samples_per_group * len(complete)
    if dropped:
        logger.warning(
            "%d of %d partial samples are dropped: their groups do not have n_samples_per_prompt=%d samples",
            dropped,
            len(samples),
            samples_per_group,
        )
    return complete
