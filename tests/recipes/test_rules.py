"""Rules beside the settings: that they can be followed, and that one function applies them all."""

from dataclasses import fields, is_dataclass
from functools import reduce
from math import inf

import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError
from ludic.recipes.compose import compose, list_builtin_recipes
from ludic.recipes.epochs_schema import compose_dpo, compose_rm, compose_sft
from ludic.recipes.rules import _RELATIONS, Rules, check_settings

RECIPES = [compose([]), compose_sft([]), compose_rm([]), compose_dpo([])]


def list_rules(section, prefix=()):
    """(path of a setting, its rules)."""
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            yield from list_rules(value, (*prefix, item.name))
        elif item.metadata:
            yield (*prefix, item.name), item.metadata


ALL = [(recipe, path, rules) for recipe in RECIPES for path, rules in list_rules(recipe)]
RELATIONS = {rules["relation"] for _, _, rules in ALL if "relation" in rules}
BOUNDED = [each for each in ALL if {"least", "above", "most", "below"} & each[2].keys()]


def conditions(rules):
    return [part for name in ("needs", "excludes") if name in rules for part in rules[name].split(" or ")]


@pytest.mark.parametrize("name", list_builtin_recipes())
def test_every_built_in_recipe_follows_the_rules(name):
    compose([name])


def test_every_rule_has_a_known_name_and_every_condition_a_setting_that_can_have_the_value():
    assert len(ALL) > 150
    assert all(rules.keys() <= Rules.__annotations__.keys() for _, _, rules in ALL)
    for recipe, path, rules in ALL:
        for condition in conditions(rules):
            name, _, wanted = condition.partition("=")
            *sections, leaf = name.split(".")
            section = reduce(getattr, sections, recipe)
            [item] = [item for item in fields(section) if item.name == leaf]
            assert not wanted or wanted in item.metadata["choices"], (path, condition)
        if "relation" in rules:
            relation, _, other = rules["relation"].rpartition(" ")
            assert relation in _RELATIONS
            assert reduce(getattr, other.split("."), recipe) is not None


@given(st.sampled_from(range(len(BOUNDED))), st.floats() | st.integers(-3, 70_000))
def test_a_number_is_refused_if_and_only_if_it_is_out_of_bounds(number, value):
    recipe, path, rules = BOUNDED[number]
    *sections, leaf = path
    section = reduce(getattr, sections, recipe)
    kept = getattr(section, leaf)
    within = rules.get("least", -inf) <= value <= rules.get("most", inf)
    within = within and ("above" not in rules or value > rules["above"]) and ("below" not in rules or value < rules["below"])
    try:
        setattr(section, leaf, value)
        check_settings(recipe)
        problem = ""
    except ConfigError as error:
        problem = str(error)
    finally:
        setattr(section, leaf, kept)
    by_relation = any(f"must be {relation} (" in problem for relation in RELATIONS)
    is_out = problem.startswith(f"{'.'.join(path)} ({value}) must be ") and not by_relation
    assert is_out != within
    assert is_out or not problem or conditions(rules) or by_relation


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["queue.order=arival", "actors=1"], r"queue\.order \(arival\) .*exact, arrival; .*mean arrival\?"),
        (["inference.routing=prefix"], r"inference\.routing \(prefix\) needs inference\.kind=vllm"),
        (["reward_model_args={dtype: auto}"], r"reward_model_args \(.*\) needs reward_model;"),
        (["lora.alpha=2"], r"lora\.alpha \(2\.0\) needs lora\.rank;"),
        (["lora.target_modules=[q_proj]"], r"lora\.target_modules \(.*\) needs lora\.rank"),
        (["callbacks.stop.patience=2"], r"callbacks\.stop\.patience \(2\) needs callbacks\.stop\.metric"),
        (["callbacks.guard.action=skip"], r"callbacks\.guard\.action \(skip\) needs callbacks\.guard\.ess"),
        (["callbacks.guard.ess=0.5", "callbacks.guard.patience=2"], r"guard\.patience \(2\) needs callbacks\.guard\.action=stop"),
        (["rollout.over_sampling_factor=inf"], r"rollout\.over_sampling_factor \(inf\) .*finite"),
        (["inference.timeout_s=0"], r"inference\.timeout_s \(0\.0\) .*above 0; .*deadline"),
        (["rollout.over_sampling_factor=0.5"], r"rollout\.over_sampling_factor \(0\.5\) .*at least 1 and finite$"),
        (
            ["queue.max_lag=3", "actors=1"],
            r"queue\.max_lag \(3\) .*queue\.order=exact; .* queue\.order=arrival$",
        ),
        (
            ["warmup.data_format=alpacca"],
            r"warmup\.data_format \(alpacca\) .*auto, messages, .*did you mean alpaca\?",
        ),
        (["network.num_heads=0"], r"network\.num_heads \(0\) must be at least 1"),
        (["place.trainers=3", "place.nodes=2", "place=ray"], r"trainers \(3\) must be a multiple of place\.nodes \(2\)"),
        (["actors=1", "queue.prompts_per_entry=5"], r"prompts_per_entry \(5\) must be a divisor of rollout\.prompts \(32\)"),
        (["network.end_of_turn=tab"], r"network\.end_of_turn \(tab\) .*eos, newline"),
        (["inference.weights=shm"], r"inference\.weights \(shm\) .*gloo, ludic_nccl, disk"),
    ],
)
def test_the_error_names_value_rule_and_remedy(arguments, message):
    with pytest.raises(ConfigError, match=message):
        compose(["sort", *arguments])


def test_the_settings_of_other_commands_follow_the_same_rules():
    for make, wrong in (
        (compose_sft, "rows=1"),
        (compose_sft, "assistant_turns=first"),
        (compose_sft, "heldout=1.0"),
        (compose_rm, "train_sample=0"),
        (compose_rm, "limit=0"),
        (compose_dpo, "warmup.answers=rejected"),
        (compose_dpo, "answers=-1"),
        (compose_dpo, "lora.dropout=0.1"),
    ):
        name, _, value = wrong.partition("=")
        with pytest.raises(ConfigError, match=rf"^{name.replace('.', '[.]')} \({value}\) (must be|needs) "):
            make([wrong])
