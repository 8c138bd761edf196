"""Parsers on good, bad and arbitrary text."""

import pytest
from hypothesis import given, strategies as st

from ludic.parsers import (
    ParseResult,
    boxed_parser,
    compose_parsers,
    cot_prefix_parser,
    extract_last_boxed_content,
    think_prefix_parser,
    xml_parser,
    xml_tag_parser,
)


def test_the_first_tag_anywhere_is_the_action():
    parse = xml_tag_parser("move")
    assert parse("I play <MOVE> a1\n </Move> or <move>b2</move>") == ParseResult("a1", 0.1, None)
    assert parse("<move>a\nb</move>").action == "a\nb"


def test_exact_allows_white_space_alone_around_one_tag():
    parse = xml_tag_parser("move", exact=True, success_reward=0.5)
    assert parse(" \n<move>a1</move> ") == ParseResult("a1", 0.5, None)
    for raw in ("so <move>a1</move>", "<move>a1</move><move>b2</move>", "<move>a1"):
        assert parse(raw).action is None


def test_failures_say_what_is_wrong():
    parse = xml_tag_parser("move", error_reward=-2.0)
    missing, empty = parse("a1"), parse("<move>  </move>")
    assert (missing.action, missing.reward) == (None, -2.0)
    assert missing.obs.startswith("Invalid action format:")
    assert "Empty" in empty.obs


def test_a_tag_is_no_pattern():
    assert xml_tag_parser("a.c")("<abc>x</abc>").action is None
    assert xml_tag_parser("a.c")("<a.c>x</a.c>").action == "x"


def test_the_answer_follows_the_thought():
    assert think_prefix_parser(" <think>hm</think> 42 ") == ParseResult("42", 0.1, None)
    assert think_prefix_parser("<think>a</think>b</think>c").action == "b</think>c"
    assert "Missing content" in think_prefix_parser("<think>x</think>   ").obs
    for raw in ("<think>x</think>", "42", "so <think>x</think> 42", "<think>x"):
        assert "Expected '<think>...</think>'" in think_prefix_parser(raw).obs
    assert cot_prefix_parser is think_prefix_parser


def test_kinds_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="exact=True is not supported"):
        xml_parser("t", exact=True, kind="remainder_after_prefix")
    with pytest.raises(ValueError, match="Unknown kind"):
        xml_parser("t", kind="outer")


def test_the_last_balanced_box_counts():
    cases = {
        r"\boxed{1} then \boxed{2}": "2",
        r"\boxed {x}": "x",
        r"\boxed{\frac{1}{2}}": r"\frac{1}{2}",
        r"\boxed{a\}b}": r"a\}b",
        r"\boxed{1} and \boxed{2": "1",
        r"\boxed{ a }": " a ",
        "none": None,
        r"\boxed{": None,
    }
    assert {raw: extract_last_boxed_content(raw) for raw in cases} == cases


def test_a_boxed_answer_is_stripped_and_never_empty():
    assert boxed_parser(r"so \boxed{ 42 }") == ParseResult("42", 0.1, None)
    for raw in ("42", r"\boxed{ }"):
        assert boxed_parser(raw).obs.startswith("Invalid boxed answer:")


def test_parsers_in_a_row_add_their_rewards_up_to_the_first_failure():
    both = compose_parsers(think_prefix_parser, xml_tag_parser("a"))
    assert both("<think>x</think><a>1</a>") == ParseResult("1", pytest.approx(0.2), None)
    failed = both("<think>x</think>1")
    assert failed.action is None
    assert failed.reward == pytest.approx(0.1 - 1.0)
    assert "<a>" in failed.obs
    assert both("1").reward == -1.0


PIECES = st.sampled_from(["<t>", "</t>", "<think>", "</think>", r"\boxed{", "{", "}", "\\", "x", " ", "\n", "<T>", "é"])


@given(st.one_of(st.text(), st.lists(PIECES, max_size=12).map("".join)))
def test_parsers_never_raise_on_what_a_model_wrote(raw):
    for parse in (xml_tag_parser("t"), xml_tag_parser("t", exact=True), think_prefix_parser, boxed_parser):
        result = parse(raw)
        assert (result.action is None) == (result.obs is not None)
        assert result.reward == (-1.0 if result.action is None else 0.1)
        assert result.action is None or result.action == result.action.strip() != ""
