"""Reads the saved state of a pool of groups. Whatever is not a state that a pool has saved is an
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

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ludic.errors import ConfigError
from ludic.interaction.containment import describe_error
from ludic.training.rollouts.group_ledger import FORMAT, MISSING, Group, Ledger, MemberCodec, Prompts

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
