"""What a pool of groups knows of each group, and the state that a checkpoint holds of it.

    owed ---> arrived ---> given          owed      some members are missing
      |                                   arrived   whole, and accepted by the filter
      +-----> rejected                    given     in a batch
      +-----> lost                        rejected  refused by the filter
                                          lost      a member failed too often

Every ordinal ever admitted is in exactly one of these states. Groups that are owed or arrived are
kept, the others only counted, so that always

    given + rejected + lost + kept == admitted

Reads the saved state of a pool of groups. Whatever is not a state that a pool has saved is an
error that names what is wrong, before anything is changed.

    {"format": 1, "batch": 3, "members_per_group": 2, "next_ordinal": 9, "arrivals": [7],
     "counts": {"given": 6, "rejected": 1, "lost": 0, "retried": 4},
     "groups": [{"ordinal": 7, "position": 7, "admitted": 2, "members": {"0": ..., "1": ...}},
                {"ordinal": 8, "position": 8, "admitted": 3, "members": {"0": ...},
                 "partials": {"1": ...}}]}

6 + 1 + 0 groups are gone and 2 are kept: 9 were admitted. `prompt` is in the groups of prompts
without positions.
"""

from __future__ import annotations

import json
import logging
import math
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from ludic.errors import ConfigError, DataError
from ludic.interaction.containment import describe_error

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the saved state."""


class GroupState(Enum):
    """Where a group stands; there is a picture at the top of this module."""

    OWED = "owed"
    ARRIVED = "arrived"
    GIVEN = "given"
    REJECTED = "rejected"
    LOST = "lost"


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()
"""Stands in `Group.members` for a member that is not played yet."""


@dataclass(slots=True, eq=False)
class Group:
    """The answers to one prompt: they are filtered, given and trained together."""

    ordinal: int
    """Its number among all groups of the run, from 0; no number is used twice."""
    position: int
    """Where its prompt is in the prompts."""
    admitted: int
    """The batch that had been asked for when it was admitted: its weights are those of that
    batch."""
    members: list[Any]
    """One entry a member; `MISSING` until the member is played."""
    prompt: Any = None
    state: GroupState = GroupState.OWED
    missing: int = 0
    """How many members are missing."""
    partials: dict[int, Any] = field(default_factory=dict)
    """Member -> what an interrupted call had sampled of it."""

    def list_missing(self) -> list[int]:
        """The members that are not played yet."""
        return [index for index, member in enumerate(self.members) if member is MISSING]


class Prompts(Protocol):
    """Where prompts come from."""

    def take(self) -> tuple[int, Any]:
        """The next (position, prompt). Raises RequestsExhausted after the last one."""
        ...

    def at(self, position: int) -> Any:
        """The prompt at a position that `take` has returned, in this process or before it."""
        ...


class MemberCodec(Protocol):
    """Turns a member into plain JSON values and back."""

    def encode(self, member: Any) -> Any:
        """The member as JSON values. Raises DataError for one that has none: a resumed run plays it
        again."""
        ...

    def decode(self, value: Any) -> Any:
        """The member of `encode`'s values."""
        ...


class PlainMembers:
    """The codec of members that are JSON values themselves."""

    def encode(self, member: Any) -> Any:
        return member

    def decode(self, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class PoolCounts:
    """How many groups a pool has admitted, and what became of them."""

    admitted: int = 0
    given: int = 0
    rejected: int = 0
    lost: int = 0
    owed: int = 0
    arrived: int = 0
    retried: int = 0
    """Calls that failed and were repeated."""

    @property
    def kept(self) -> int:
        """Groups that are owed or arrived."""
        return self.owed + self.arrived


class GroupBatch(list[Group]):
    """The groups of a batch in the order of their ordinals."""

    def __init__(self, groups: list[Group], number: int, counts: PoolCounts, before: PoolCounts) -> None:
        super().__init__(sorted(groups, key=lambda group: group.ordinal))
        self.number = number
        """From 0."""
        self.rejected = counts.rejected - before.rejected
        """Groups that were rejected since the batch before."""
        self.lost = counts.lost - before.lost
        """Groups that were lost since the batch before."""
        self.retried = counts.retried - before.retried
        """Calls that were repeated since the batch before."""

    @property
    def lags(self) -> list[int]:
        """For each group, how many batches were asked for after its admission, up to this one."""
        return [self.number - group.admitted for group in self]


class Ledger:
    """The kept groups of a pool in the order of their ordinals, and the counts of the others.

    Every method changes the state of one group in one step, without an await, so that `state_dict`
    is right at any moment.
    """

    def __init__(self, members_per_group: int) -> None:
        self._members_per_group = members_per_group
        self._kept: dict[int, Group] = {}
        self._arrived = 0
        self._totals = {GroupState.GIVEN: 0, GroupState.REJECTED: 0, GroupState.LOST: 0}
        self.admitted = 0
        self.retried = 0

    def __len__(self) -> int:
        """The number of kept groups."""
        return len(self._kept)

    def __contains__(self, ordinal: int) -> bool:
        """Whether the group is kept."""
        return ordinal in self._kept

    def oldest_position(self) -> int | None:
        """The position of the prompt of the oldest kept group; None if no group is kept."""
        return next((group.position for group in self._kept.values()), None)

    def owed(self) -> Iterator[Group]:
        """The groups with missing members, and those that the filter has not judged."""
        return (group for group in list(self._kept.values()) if group.state is GroupState.OWED)

    def admit(self, position: int, prompt: Any, batch: int) -> Group:
        """A new group for the prompt, with all members missing."""
        group = self._make_group(self.admitted, position, batch)
        group.prompt = prompt
        self._kept[group.ordinal] = group
        self.admitted += 1
        return group

    def fill(self, group: Group, member: int, value: Any) -> bool:
        """Put a played member in its slot. Returns whether the group is whole now."""
        assert group.state is GroupState.OWED
        assert group.members[member] is MISSING
        group.members[member] = value
        group.partials.pop(member, None)
        group.missing -= 1
        return group.missing == 0

    def arrive(self, group: Group) -> None:
        """The group is whole, and the filter has accepted it."""
        assert group.state is GroupState.OWED
        assert group.missing == 0
        group.state = GroupState.ARRIVED
        self._arrived += 1

    def remove(self, group: Group, state: GroupState) -> None:
        """The group is given, rejected or lost: from now on it is only counted."""
        self._arrived -= group.state is GroupState.ARRIVED
        group.state = state
        del self._kept[group.ordinal]
        self._totals[state] += 1

    def count(self) -> PoolCounts:
        """All counts."""
        totals = {state.value: number for state, number in self._totals.items()}
        owed = len(self._kept) - self._arrived
        return PoolCounts(admitted=self.admitted, owed=owed, arrived=self._arrived, retried=self.retried, **totals)

    def encode(self, codec: MemberCodec, arrivals: Sequence[Group], *, with_prompts: bool) -> dict[str, Any]:
        """The state as JSON values. `arrivals`: the arrived groups in the order of arrival.
        `with_prompts`: the prompts are in it, not only their positions."""
        groups = [self._encode_group(group, codec, with_prompts) for group in self._kept.values()]
        whole = {saved["ordinal"] for saved in groups if len(saved["members"]) == self._members_per_group}
        counts = {state.value: number for state, number in self._totals.items()}
        return {
            "format": FORMAT,
            "members_per_group": self._members_per_group,
            "next_ordinal": self.admitted,
            "counts": {**counts, "retried": self.retried},
            "groups": groups,
            "arrivals": [group.ordinal for group in arrivals if group.ordinal in whole],
        }

    def _encode_group(self, group: Group, codec: MemberCodec, with_prompts: bool) -> dict[str, Any]:
        members = {i: member for i, member in enumerate(group.members) if member is not MISSING}
        saved: dict[str, Any] = {
            "ordinal": group.ordinal,
            "position": group.position,
            "admitted": group.admitted,
            "members": _encode_members(members, group, codec),
        }
        if partials := _encode_members(group.partials, group, codec):
            saved["partials"] = partials
        if with_prompts:
            saved["prompt"] = _encode_prompt(group)
        return saved

    def restore(self, groups: Iterable[Group], *, admitted: int, counts: Mapping[str, int]) -> None:
        """Keep these groups, in the order of their ordinals, which are owed; the others of
        `admitted` are counted in `counts`."""
        self._kept, self._arrived = {group.ordinal: group for group in groups}, 0
        self._totals = {kind: counts[kind.value] for kind in self._totals}
        self.admitted, self.retried = admitted, counts["retried"]

    def _make_group(self, ordinal: int, position: int, batch: int) -> Group:
        number = self._members_per_group
        return Group(ordinal, position, batch, members=[MISSING] * number, missing=number)


def _encode_prompt(group: Group) -> Any:
    """A copy of the prompt as JSON gives it back. Raises DataError if it has no such form."""
    try:
        copy = json.loads(json.dumps(group.prompt))
        if not _has_come_back(group.prompt, copy):
            raise ValueError(f"it would come back as {reprlib.repr(copy)}")
        return copy
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the prompt of group {group.ordinal} has no form in JSON ({error}), and must be in the state because prompts are not found "
            "by position; give the buffer `position` and `at(position)`, or use prompts of texts, numbers, lists and mappings "
            "whose keys are texts"
        ) from error


def _has_come_back(value: Any, copy: Any) -> bool:
    """Whether JSON has kept the value, apart from tuples, which become lists. Example: {1: "a"} has
    come back as {"1": "a"}, which is another value."""
    if isinstance(value, list | tuple):
        return isinstance(copy, list) and len(value) == len(copy) and all(map(_has_come_back, value, copy))
    if isinstance(value, dict):
        return (
            isinstance(copy, dict) and value.keys() == copy.keys() and all(_has_come_back(value[key], copy[key]) for key in copy)
        )
    is_nan = isinstance(value, float) and math.isnan(value) and isinstance(copy, float) and math.isnan(copy)
    return is_nan or bool(value == copy)


def _encode_members(members: Mapping[int, Any], group: Group, codec: MemberCodec) -> dict[str, Any]:
    """The members, or what is sampled of them, that have a form."""
    encoded = {}
    for i, member in members.items():
        try:
            encoded[str(i)] = codec.encode(member)
        except DataError as error:
            logger.warning("member %d of group %d cannot be saved (%s); a resumed run plays it again", i, group.ordinal, error)
    return encoded


_KEYS = {"batch", "format", "members_per_group", "next_ordinal", "counts", "groups", "arrivals"}
_COUNTS = {"given", "rejected", "lost", "retried"}
_GROUP_KEYS = {"ordinal", "position", "admitted", "members"}


@dataclass(frozen=True)
class SavedPool:
    """What a state says."""

    ledger: Ledger
    """Its groups are all owed: the caller lets arrive those of `arrivals`."""
    arrivals: list[Group]
    """In the order of arrival."""
    batch: int
    """How many batches the pool had given."""


def read_state(state: Any, codec: MemberCodec, members_per_group: int, *, with_prompts: bool) -> SavedPool:
    """The groups of a state. `with_prompts`: the prompts are in it.

    Raises ConfigError for a state of another format or number of members, and for a damaged one.
    """
    check_state(state, members_per_group, with_prompts=with_prompts)
    ledger, groups = Ledger(members_per_group), {}
    for saved in state["groups"]:
        group = Group(saved["ordinal"], saved["position"], saved["admitted"], [MISSING] * members_per_group)
        group.prompt = saved.get("prompt")
        members = _decode_members(saved, "members", codec)
        for i, value in members.items():
            group.members[i] = value
        group.missing = members_per_group - len(members)
        group.partials = _decode_members(saved, "partials", codec)
        groups[group.ordinal] = group
    ledger.restore(groups.values(), admitted=state["next_ordinal"], counts=state["counts"])
    return SavedPool(ledger, [groups[ordinal] for ordinal in state["arrivals"]], state["batch"])


def check_state(state: Any, members_per_group: int, *, with_prompts: bool) -> None:
    """Raise ConfigError unless this has the form of a state, with groups of so many members. What
    is saved of each member is not read."""
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, Mapping) else state
        raise ConfigError(f"the saved pool of groups has format {found!r}, this version reads {FORMAT}; take its own checkpoint")
    _check_keys("the state", state, _KEYS)
    check_number("members_per_group", state["members_per_group"], least=1)
    if state["members_per_group"] != members_per_group:
        raise ConfigError(
            f"the saved groups have {state['members_per_group']} members each, here they have {members_per_group}, and a group is never "
            "split; set the old number, or begin a new run"
        )
    check_number("batch", state["batch"])
    check_number("next_ordinal", state["next_ordinal"])
    _check_keys("counts", state["counts"], _COUNTS)
    for name, count in state["counts"].items():
        check_number(f"counts.{name}", count)
    if not isinstance(state["groups"], list) or not isinstance(state["arrivals"], list):
        raise damaged("groups and arrivals must be lists")
    gone = sum(state["counts"][name] for name in ("given", "rejected", "lost"))
    if gone + len(state["groups"]) != state["next_ordinal"]:
        raise damaged(
            f"{gone} groups are gone and {len(state['groups'])} are kept, which is not the {state['next_ordinal']} that were admitted"
        )
    before, whole = -1, set()
    for group in state["groups"]:
        _check_group(group, state, before, with_prompts=with_prompts)
        before = group["ordinal"]
        if len(group["members"]) == members_per_group:
            whole.add(before)
    _check_arrivals(state["arrivals"], whole)


def find_prompts(ledger: Ledger, prompts: Prompts) -> None:
    """Look up the prompts of the owed groups. Raises ConfigError for a position without one."""
    for group in ledger.owed():
        try:
            group.prompt = prompts.at(group.position)
        except ConfigError:
            raise
        except Exception as error:
            where = f"group {group.ordinal} is at position {group.position}"
            raise damaged(f"{where}, where there is no prompt ({describe_error(error)})") from error


def damaged(what: str) -> ConfigError:
    """The error of a state that no pool has saved."""
    return ConfigError(f"the saved pool of groups is damaged: {what}; take an older checkpoint")


def check_number(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """The value. Raises ConfigError unless it is a whole number within these limits."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limits = f">= {least}" if most is None else f"from {least} to {most}"
        raise damaged(f"{name} ({value!r}) must be a whole number {limits}")
    return value


def _check_keys(name: str, value: Any, wanted: set[str], allowed: Collection[str] = ()) -> None:
    if not isinstance(value, Mapping):
        raise damaged(f"{name} ({value!r}) must be a mapping")
    if missing := sorted(wanted - set(value)):
        raise damaged(f"{name} has no {' and no '.join(missing)}")
    if unknown := sorted(str(key) for key in set(value) - wanted - set(allowed)):
        raise damaged(f"{name} has the unknown keys {', '.join(unknown)}")


def _check_group(group: Any, state: Mapping[str, Any], before: int, *, with_prompts: bool) -> None:
    _check_keys("a group", group, _GROUP_KEYS, ("partials", "prompt"))
    check_number("the ordinal of a group", group["ordinal"], most=state["next_ordinal"] - 1)
    name, number = f"group {group['ordinal']}", state["members_per_group"]
    if group["ordinal"] <= before:
        raise damaged(f"{name} comes after group {before}, and ordinals are unique and in order")
    check_number(f"the batch of admission of {name}", group["admitted"], most=state["batch"])
    indices = {key: _check_members(f"{name}.{key}", group.get(key, {}), number) for key in ("members", "partials")}
    if both := sorted(indices["members"] & indices["partials"]):
        raise damaged(f"member {both[0]} of {name} is both whole and interrupted")
    if not group.get("partials", True):
        raise damaged(f"{name}.partials is empty")
    is_owed = len(indices["members"]) < number
    check_number(f"the position of {name}", group["position"], least=0 if is_owed else -1)
    if with_prompts and is_owed and "prompt" not in group:
        raise damaged(f"{name} has no prompt")
    if not with_prompts and "prompt" in group:
        raise ConfigError(
            f"{name} was saved with its prompt, because the prompts had no positions then, and now they have; load the state with the "
            "buffer it was saved with, or begin a new run"
        )


def _check_members(name: str, saved: Any, number: int) -> set[int]:
    """The members that are saved. Raises ConfigError for one that no group has."""
    if not isinstance(saved, Mapping):
        raise damaged(f"{name} ({saved!r}) must be a mapping")
    known = {str(i): i for i in range(number)}
    if wrong := [key for key in saved if key not in known]:
        raise damaged(f"{name} has the member {wrong[0]!r}, and groups have the members 0 to {number - 1}")
    return {known[key] for key in saved}


def _check_arrivals(arrivals: list[Any], whole: set[int]) -> None:
    seen = set()
    for ordinal in arrivals:
        check_number("an ordinal of arrivals", ordinal)
        if ordinal in seen or ordinal not in whole:
            raise damaged(f"group {ordinal} arrived {'twice' if ordinal in seen else 'and is not whole'}")
        seen.add(ordinal)


def _decode_members(group: Mapping[str, Any], key: str, codec: MemberCodec) -> dict[int, Any]:
    decoded = {}
    for i, value in group.get(key, {}).items():
        try:
            decoded[int(i)] = codec.decode(value)
        except ConfigError:
            raise
        except Exception as error:
            raise damaged(f"member {i} of group {group['ordinal']} cannot be read ({describe_error(error)})") from error
    return decoded
