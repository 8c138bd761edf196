"""A damaged state of a pool is an error that names what is wrong, and changes nothing."""

import asyncio
import json
import random

import pytest
from hypothesis import given, strategies as st
from jumping_loop import play_jumping
from pool_playing import Fate, PlayedPool
from state_edits import edit

from ludic.errors import ConfigError, DataError
from ludic.training.rollouts.group_ledger import Ledger, MemberCodec, find_prompts, read_state

SETTINGS = {"groups_per_batch": 3, "members_per_group": 2, "over_sampling_factor": 2.0, "patience": 1000}


def play_for_a_while(seed, *, has_partials=False):
    """The state of a pool with owed and arrived groups, counts, and perhaps partial members."""

    async def scenario():
        played = PlayedPool(Fate(seed, rejected=0.2, failing=0.1), SETTINGS)
        async with played.pool:
            for _ in range(3):
                await played.pool.next_batch()
            await asyncio.sleep(random.Random(seed).random() * 2)
            return json.loads(json.dumps(played.pool.state_dict()))

    state = play_jumping(scenario())
    for group in state["groups"] if has_partials else ():
        missing = {"0", "1"} - set(group["members"])
        if missing:
            group["partials"] = {min(missing): [1, 2]}
    return state


STATES = [play_for_a_while(seed, has_partials=seed % 2 == 1) for seed in range(6)]


def new_pool():
    return PlayedPool(Fate(), SETTINGS).pool


@pytest.mark.parametrize("state", STATES)
def test_a_state_is_read_as_it_was_written(state):
    pool = new_pool()
    pool.load_state_dict(state)
    assert pool.state_dict() == state
    assert len(state["groups"]) == pool.counts.kept > 2


@given(st.sampled_from(STATES), st.integers(0, 2**32), st.integers(1, 3))
def test_a_random_edit_is_read_as_it_is_or_refused_and_changes_nothing(state, seed, number):
    edited, rng = state, random.Random(seed)
    for _ in range(number):
        edited = edit(edited, rng)
    pool = new_pool()
    pool.load_state_dict(STATES[0])
    try:
        pool.load_state_dict(edited)
    except ConfigError:
        assert pool.state_dict() == STATES[0]
    else:
        assert pool.state_dict() == edited


def replace_in(state, path, value):
    """A copy of the state with the value at the path."""
    copy = json.loads(json.dumps(state))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ["groups", 1, "ordinal"],
            STATES[0]["groups"][0]["ordinal"],
            "no pool saves such groups",
        ),
        (["groups", -1, "ordinal"], 10**6, "is damaged: KeyError: 14"),
        (["groups", 0, "admitted"], True, r"admitted \(True\) must be a whole number"),
        (["groups", 1, "position"], -1, "an owed group has no position"),
        (["groups", 0, "position"], "7", r"position \('7'\) must be a whole number"),
        (["groups", 0, "members"], {"2": 0}, "IndexError"),
        (["groups", 0, "partials"], {"-1": 0}, "an interrupted member is not missing"),
        (["groups", 0], {"ordinal": 3}, "KeyError: 'position'"),
        (["groups", 0], 7, "is damaged: TypeError"),
        (["groups", 0, "admitted"], 4, "group .*admitted after the last batch"),
        (["groups", 0, "prompt"], "p", "was saved with its prompt"),
        (["arrivals"], [0], "KeyError: 0"),
        (["arrivals"], {}, "no pool saves such arrivals"),
        (["counts", "lost"], -1, r"counts \(-1\) .*>= 0"),
        (["counts", "lost"], 100, "counts and groups .*not all"),
        (["batch"], "3", r"batch \('3'\)"),
        (["members_per_group"], 3, "have 3 members each, here .*2"),
        (["format"], 2, "format 2, this version reads 1"),
        (["note"], 1, "no pool saves such note"),
    ],
)
def test_what_is_wrong_is_named(path, value, message):
    pool = new_pool()
    with pytest.raises(ConfigError, match=message):
        pool.load_state_dict(replace_in(STATES[0], path, value))
    assert pool.counts.admitted == 0


def test_an_arrival_twice_and_a_member_that_is_whole_and_partial_are_named():
    state = next(state for state in STATES if state["arrivals"])
    first = state["arrivals"][0]
    with pytest.raises(ConfigError, match="a group has arrived twice"):
        new_pool().load_state_dict({**state, "arrivals": [first, first]})
    place = next(i for i, group in enumerate(state["groups"]) if group["ordinal"] == first)
    with pytest.raises(ConfigError, match="an interrupted member is not missing"):
        new_pool().load_state_dict(replace_in(state, ["groups", place, "partials"], {"0": 1}))


class Stumbling:
    """A codec, and prompts, that raise what nobody expects."""

    def encode(self, member):
        return member

    def decode(self, value):
        raise KeyError("tokens")

    def at(self, position):
        raise IndexError("list index out of range")


def test_members_and_prompts_that_cannot_be_read_are_named():
    state = next(state for state in STATES if any(group["members"] for group in state["groups"]))
    with pytest.raises(ConfigError, match=r"member \d of group \d+ .*KeyError: 'tokens'.*older checkpoint"):
        read_state(state, Stumbling(), 2, with_prompts=False)
    ledger, _ = read_state(state, MemberCodec(), 2, with_prompts=False)
    with pytest.raises(ConfigError, match=r"group \d+ .*position \d+, .*no prompt \(IndexError"):
        find_prompts(ledger, Stumbling())


NUMBERS = st.integers() | st.floats()
PROMPTS = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda parts: st.lists(parts) | st.tuples(parts) | st.dictionaries(st.text() | st.integers(), parts),
    max_leaves=8,
)


@given(PROMPTS)
def test_a_prompt_in_the_state_is_the_prompt_or_an_error(prompt):
    """`repr` tells 1 from "1", which JSON does not for keys. Tuples are lists in the state."""
    ledger = Ledger(2)
    ledger.admit(0, prompt, 0)
    if has_other_keys(prompt):
        with pytest.raises(DataError, match=r"prompt of group 0 .*JSON"):
            ledger.encode(None, [], with_prompts=True)
        return
    [saved] = ledger.encode(None, [], with_prompts=True)["groups"]
    assert repr(saved["prompt"]) == repr(with_lists(prompt))


def has_other_keys(value):
    """Whether a key is not a text."""
    if isinstance(value, dict):
        return any(not isinstance(key, str) or has_other_keys(part) for key, part in value.items())
    return isinstance(value, list | tuple) and any(map(has_other_keys, value))


def with_lists(value):
    """The value with lists in place of tuples."""
    if isinstance(value, dict):
        return {key: with_lists(part) for key, part in value.items()}
    return [with_lists(part) for part in value] if isinstance(value, list | tuple) else value
