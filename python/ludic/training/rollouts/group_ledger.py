"""What a pool of groups knows of each group, and the state that a checkpoint holds of it.

    owed ---> arrived ---> given          owed      some members are missing
      |                                   arrived   whole, and accepted by the filter
      +-----> rejected                    given     in a batch
      +-----> lost                        rejected  refused by the filter
                                          lost      a member failed too often

Every ordinal ever admitted is in exactly one of these states. Groups that are owed or arrived are
kept, the others only counted, so that always

    given + rejected + lost + kept == admitted

Reads the saved state of a pool of groups. Whatever is not a state that a pool has saved is an error
that names the fault, before anything is changed.

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
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from ludic.errors import ConfigError, DataError
from ludic.event_loop import describe_error

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


MISSING: Any = object()
"""Stands in `Group.members` for a member that is not played yet."""


@dataclass(slots=True, eq=False)
class Group:
    """The answers to one prompt: they are filtered, given and trained together."""

    ordinal: int
    """Its number among all groups of the run, from 0; no number is used twice."""
    position: int
    """Where its prompt is in the prompts."""
    admitted: int
    """The batch that had been requested when it was admitted: it begins with the weights of that
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


@runtime_checkable
class Prompts(Protocol):
    """Where prompts or requests come from. An own class may have `state_dict` and
    `load_state_dict` too."""

    def take(self) -> tuple[int, Any]:
        """The next (position, prompt). Raises RequestsExhausted after the last one."""
        ...

    def at(self, position: int) -> Any:
        """The prompt at a position that `take` has returned, in this process or before it."""
        ...


class MemberCodec:
    """Turns a member into plain JSON values and back. This one is for members that are such
    values."""

    def encode(self, member: Any) -> Any:
        """The member as JSON values. Raises DataError for one that has none: a resumed run plays it
        again."""
        return member

    def decode(self, value: Any) -> Any:
        """The member of `encode`'s values."""
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
        """For each group, how many batches were requested after its admission, up to this one."""
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
        group = self.make_group(self.admitted, position, batch)
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
        groups = []
        for group in self._kept.values():
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
            groups.append(saved)
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

    def restore(self, groups: Iterable[Group], *, admitted: int, counts: Mapping[str, int]) -> None:
        """Keep these groups, in the order of their ordinals, which are owed; the others of
        `admitted` are counted in `counts`."""
        self._kept, self._arrived = {group.ordinal: group for group in groups}, 0
        self._totals = {kind: counts[kind.value] for kind in self._totals}
        self.admitted, self.retried = admitted, counts["retried"]

    def make_group(self, ordinal: int, position: int, batch: int) -> Group:
        """A group with all members missing."""
        number = self._members_per_group
        return Group(ordinal, position, batch, members=[MISSING] * number, missing=number)


def _encode_prompt(group: Group) -> Any:
    """A copy of the prompt as JSON gives it back. Raises DataError if it has no such form."""
    try:
        copy = json.loads(json.dumps(group.prompt))
        if not _has_text_keys(group.prompt):
            raise ValueError(f"it would come back as {reprlib.repr(copy)}")
        return copy
    except (TypeError, ValueError) as error:
        raise DataError(f"prompt of group {group.ordinal} is not JSON ({error}); give the buffer `position` and `at`") from error


def _has_text_keys(value: Any) -> bool:
    """Whether JSON keeps the value, apart from tuples, which become lists. Example: {1: "a"} would
    come back as {"1": "a"}, which is another value."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(part) for key, part in value.items())
    return not isinstance(value, list | tuple) or all(map(_has_text_keys, value))


def _encode_members(members: Mapping[int, Any], group: Group, codec: MemberCodec) -> dict[str, Any]:
    """The members, or their samples, that have a form."""
    encoded = {}
    for i, member in members.items():
        try:
            encoded[str(i)] = codec.encode(member)
        except DataError as error:
            logger.warning("member %d of group %d cannot be saved (%s); a resumed run plays it again", i, group.ordinal, error)
    return encoded


def read_state(state: Any, codec: MemberCodec, members_per_group: int, *, with_prompts: bool) -> tuple[Ledger, list[Group]]:
    """(ledger, arrived groups in the order of arrival) of a state. All groups of the ledger are
    owed: the caller lets the others arrive. `with_prompts`: the prompts are in the state.

    Raises ConfigError for a state of another format or number of members, and for one that a pool
    would not save.
    """
    found = state.get("format") if isinstance(state, Mapping) else state
    if found != FORMAT or not isinstance(state, Mapping):
        raise ConfigError(f"the saved pool of groups has format {found!r}, this version reads {FORMAT}; take its own checkpoint")
    members = state.get("members_per_group")
    if members != members_per_group:
        raise ConfigError(f"the saved groups have {members} members each, here they have {members_per_group}; set the old number")
    ledger = Ledger(members_per_group)
    arrivals = _restore(ledger, state)
    for group, saved in zip(ledger.owed(), state["groups"], strict=True):
        if with_prompts and group.missing and "prompt" not in saved:
            raise damaged(f"group {group.ordinal} has no prompt")
        if not with_prompts and "prompt" in saved:
            raise ConfigError(f"group {group.ordinal} was saved with its prompt; load it with the buffer it was saved with")
        group.members = [value if value is MISSING else _decode(value, i, group, codec) for i, value in enumerate(group.members)]
        group.partials = {i: _decode(value, i, group, codec) for i, value in group.partials.items()}
    return ledger, arrivals


def _restore(ledger: Ledger, state: Mapping[str, Any]) -> list[Group]:
    """Put the groups of a state, with encoded members, into the ledger. Returns the arrived ones.
    Raises ConfigError unless the ledger saves the same state."""
    groups: dict[int, Group] = {}
    try:
        for saved in state["groups"]:
            group = groups[saved["ordinal"]] = ledger.make_group(saved["ordinal"], saved["position"], saved["admitted"])
            group.prompt = saved.get("prompt")
            for i, value in saved["members"].items():
                group.members[int(i)] = value
            group.missing = len(group.list_missing())
            group.partials = {int(i): value for i, value in saved.get("partials", {}).items()}
        ledger.restore(groups.values(), admitted=state["next_ordinal"], counts=state["counts"])
        arrivals = [groups[ordinal] for ordinal in state["arrivals"]]
        again = {"batch": state["batch"], **ledger.encode(MemberCodec(), arrivals, with_prompts=False)}
        read = {**state, "groups": [{key: group[key] for key in group if key != "prompt"} for group in state["groups"]]}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise damaged(describe_error(error)) from error
    if wrong := [str(key) for key in {**again, **read} if again.get(key, MISSING) != read.get(key, MISSING)]:
        raise damaged(f"no pool saves such {' and '.join(wrong)}")
    kept = groups.values()
    ordinals, counts = [group.ordinal for group in kept], state["counts"]
    numbers = {"batch": [state["batch"]], "next_ordinal": [ledger.admitted], "counts": counts.values(), "ordinal": ordinals}
    numbers |= {"position": [group.position for group in kept], "admitted": [group.admitted for group in kept]}
    for name, values in numbers.items():
        for value in values:
            check_number(name, value, least=-1 if name == "position" else 0)
    laws = {
        "counts and groups are not all that were admitted": sum(counts.values()) - counts["retried"] + len(kept)
        == ledger.admitted,
        "ordinals must be unique and in order": ordinals == sorted(ordinals) and max(ordinals, default=-1) < ledger.admitted,
        "a group was admitted after the last batch": all(group.admitted <= state["batch"] for group in kept),
        "an owed group has no position": all(group.position >= 0 or not group.missing for group in kept),
        "an interrupted member is not missing": all(set(group.partials) <= set(group.list_missing()) for group in kept),
        "a group has arrived twice": len(set(state["arrivals"])) == len(arrivals),
    }
    for what, holds in laws.items():
        if not holds:
            raise damaged(what)
    return arrivals


def _decode(value: Any, member: int, group: Group, codec: MemberCodec) -> Any:
    try:
        return codec.decode(value)
    except ConfigError:
        raise
    except Exception as error:
        raise damaged(f"member {member} of group {group.ordinal} cannot be read ({describe_error(error)})") from error


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
