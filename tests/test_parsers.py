"""Parsers on well-formed, malformed, hostile and random text."""

import time
from functools import partial

import pytest
from hypothesis import given, strategies as st

from ludic.errors import LudicError
from ludic.parsers import (
    ParseResult,
    boxed_parser,
    code_block_parser,
    compose_parsers,
    cot_prefix_parser,
    extract_last_boxed_content,
    extract_last_code_block,
    think_prefix_parser,
    xml_parser,
    xml_tag_parser,
)

PARSERS = {
    "inner": xml_tag_parser("answer"),
    "exact": xml_tag_parser("answer", exact=True),
    "remainder": xml_parser("think", kind="remainder_after_prefix"),
    "think": think_prefix_parser,
    "boxed": boxed_parser,
    "composed": compose_parsers(think_prefix_parser, xml_tag_parser("answer"), boxed_parser),
}
# Text made of the pieces that the parsers look for, so that most draws are nearly right.
pieces = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "<ANSWER>",
        r"\boxed{",
        "\\boxed",
        "{",
        "}",
        r"\{",
        r"\}",
        "\\",
        " ",
        "\n",
        "4",
        "x",
    ]
)
nearly_right = st.lists(pieces, max_size=14).map("".join)
anything = st.text() | nearly_right


@pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)
@given(raw=anything)
def test_parsers_never_raise_and_return_an_action_or_feedback(parser, raw):
    result = parser(raw)
    if result.action is None:
        assert result.reward < 0
        assert result.obs.startswith(("Invalid action format:", "Invalid boxed answer:"))
    else:
        assert result.action
        assert result.action == result.action.strip()
        assert result.obs is None
        assert result.reward > 0


@given(nearly_right)
def test_text_that_parses_exactly_also_parses_by_search(raw):
    exact = PARSERS["exact"](raw)
    if exact.action is not None:
        assert PARSERS["inner"](raw) == exact


@pytest.mark.parametrize(
    ("raw", "action"),
    [
        ("<answer>4</answer>", "4"),
        ("so <Answer> 4\n</ANSWER> or <answer>5</answer>", "4"),  # the first tag, case-insensitive, stripped
        ("<answer>two\nlines</answer>", "two\nlines"),
        ("<answer>1 <answer>2</answer>", "1 <answer>2"),  # from the first opening tag to the first closing tag
        ("</answer><answer>4</answer>", "4"),
    ],
)
def test_inner_is_the_first_pair_of_tags_anywhere(raw, action):
    assert PARSERS["inner"](raw) == ParseResult(action, 0.1, None)


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        ("4", "Expected <answer>...</answer>"),
        ("<answer>4", "Expected <answer>...</answer>"),
        ("</answer>4<answer>", "Expected <answer>...</answer>"),
        ("<answer> \n </answer>", "Empty"),
        ("<answer></answer><answer>4</answer>", "Empty"),  # the first pair is the one that counts
    ],
)
def test_the_error_of_inner_names_the_missing_tag(raw, part):
    result = PARSERS["inner"](raw)
    assert (result.action, result.reward) == (None, -1.0)
    assert result.obs.startswith("Invalid action format:")
    assert part in result.obs


@pytest.mark.parametrize(
    ("raw", "action"),
    [
        (" \n<answer> 4 </answer>\n", "4"),
        ("x <answer>4</answer>", None),
        ("<answer>4</answer> x", None),
        ("<answer>4</answer><answer>5</answer>", None),
        ("<answer>4<answer>5</answer>", None),
        ("<answer>4</answer></answer>", None),
        ("<answer> </answer>", None),
    ],
)
def test_exact_requires_one_pair_of_tags_and_nothing_around_it(raw, action):
    assert PARSERS["exact"](raw).action == action


def test_a_tag_is_matched_as_text_and_not_as_a_pattern():
    parser = xml_tag_parser("a.b")
    assert parser("<a.b>4</a.b>").action == "4"
    assert parser("<axb>4</axb>").action is None


@pytest.mark.parametrize(
    ("raw", "action", "part"),
    [
        ("<think>x</think> 4 ", "4", None),
        ("\n<THINK></Think>4", "4", None),
        ("<think>a</think>b</think>c", "b</think>c", None),  # up to the first closing tag
        ("<think>x</think>   ", None, "Missing content"),
        ("<think>x</think>", None, "Expected '<think>...</think>'"),
        ("4 <think>x</think> 4", None, "Expected '<think>...</think>'"),
        ("<think>x", None, "Expected '<think>...</think>'"),
        ("", None, "Expected '<think>...</think>'"),
    ],
)
def test_the_answer_is_the_text_after_the_thinking(raw, action, part):
    result = think_prefix_parser(raw)
    assert result.action == action
    if part:
        assert part in result.obs
    assert cot_prefix_parser(raw) == result == PARSERS["remainder"](raw)


def test_rewards_follow_the_settings():
    parser = xml_tag_parser("a", success_reward=0.5, error_reward=-2.0)
    assert parser("<a>1</a>").reward == 0.5
    assert parser("1").reward == -2.0
    thinking = partial(think_prefix_parser, success_reward=0.0, error_reward=-0.25)
    assert (thinking("<think>x</think>4").reward, thinking("4").reward) == (0.0, -0.25)
    assert boxed_parser(r"\boxed{4}", success_reward=0.7).reward == 0.7
    assert boxed_parser("4", error_reward=-0.7).reward == -0.7


def test_contradictory_settings_are_refused_by_the_constructor():
    with pytest.raises(ValueError, match="exact=True is not supported") as caught:
        xml_parser("think", exact=True, kind="remainder_after_prefix")
    assert isinstance(caught.value, LudicError)
    with pytest.raises(ValueError, match=r"Unknown kind 'outer'; .*one of inner"):
        xml_parser("think", kind="outer")


def test_composed_parsers_pass_on_the_action_and_sum_their_rewards():
    parser = compose_parsers(think_prefix_parser, xml_tag_parser("move", success_reward=0.25))
    assert parser("<think>x</think><move>A1</move>") == ParseResult("A1", 0.1 + 0.25, None)


def test_the_first_failing_parser_ends_the_chain_and_earlier_rewards_count():
    seen = []

    def never(raw):
        seen.append(raw)
        return ParseResult(raw, 1.0, None)

    result = compose_parsers(think_prefix_parser, xml_tag_parser("move", error_reward=-0.5), never)("<think>x</think>A1")
    assert (result.action, result.reward) == (None, 0.1 - 0.5)
    assert "Expected <move>...</move>" in result.obs
    assert seen == []


def test_an_empty_composition_returns_the_text_unchanged():
    assert compose_parsers()(" 4 ") == ParseResult(" 4 ", 0.0, None)


@pytest.mark.parametrize(
    ("raw", "content"),
    [
        (r"\boxed{4}", "4"),
        (r"\boxed{1} and \boxed{ 2 }", " 2 "),  # the last box, not stripped
        ("\\boxed \n{4}", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{a\\}", r"a\\"),  # an escaped backslash, then the closing brace
        (r"\boxed{1} then \boxed{2", "1"),  # the last box is not closed, so the one before it counts
        (r"\boxed{a \boxed{b}}", "b"),
        (r"\boxed{a \boxed{b}", "b"),
        (r"}{ \boxed{4} }", "4"),
        (r"\boxed{}", ""),
        (r"\boxed{\}", None),
        (r"\boxed 4", None),
        ("4", None),
        ("", None),
    ],
)
def test_the_last_closed_box_counts(raw, content):
    assert extract_last_boxed_content(raw) == content


def last_box_slowly(raw):
    """From the last box to the first, walk to the closing brace."""
    for start in range(len(raw), -1, -1):
        rest = raw[start:]
        head = rest.removeprefix("\\boxed").lstrip()
        if not rest.startswith("\\boxed") or not head.startswith("{"):
            continue
        content, depth, escaped = "", 1, False
        for char in head[1:]:
            if not escaped:
                depth += {"{": 1, "}": -1}.get(char, 0)
            if depth == 0:
                return content
            content += char
            escaped = char == "\\" and not escaped
    return None


@given(nearly_right)
def test_boxes_equal_those_of_a_slow_brace_walk(raw):
    assert extract_last_boxed_content(raw) == last_box_slowly(raw)


def test_a_box_is_stripped_and_must_not_be_empty():
    assert boxed_parser(r"so \boxed{ 4 }") == ParseResult("4", 0.1, None)
    for raw in (r"\boxed{ }", r"\boxed{4", "4"):
        result = boxed_parser(raw)
        assert (result.action, result.reward) == (None, -1.0)
        assert result.obs.startswith("Invalid boxed answer:")


@pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)
@pytest.mark.parametrize("piece", ["<answer>", "</answer>", "<think>", "</think> ", r"\boxed{", "{", "}", "\\boxed ", " "])
def test_parsing_time_is_linear_in_the_text(parser, piece):
    """200,000 characters of hostile text. Quadratic time would take minutes; the limit is a
    thousand times the usual time."""
    raw = (piece * 200_000)[:200_000]
    start = time.process_time()
    parser(raw)
    parser("<think>" + raw)
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("So:\n```py\nx = 1\n\n  y\n```\nDone.", "x = 1\n\n  y"),
        ("```\nx = 1\n```", "x = 1"),  # no language
        ("``` Python title=a\nx = 1\n```", "x = 1"),
        ("~~~python\nx = 1\n~~~", "x = 1"),
        ("~~~\nx = '''\n```\n'''\n~~~", "x = '''\n```\n'''"),
        ("````python\n```\nx\n```\n````", "```\nx\n```"),  # a longer fence holds shorter ones
        ("```python\nx = 1", "x = 1"),  # not closed
        ("```python\nx = 1\n`````", "x = 1"),
        ("```python\nx = 1\n\nSo better:\n```python\nx = 2\n```", "x = 2"),
        ("```python\nx = 1\n```\n```python\nx = 2\n```", "x = 2"),
        ("```python\nx = 1\n```\nIt prints\n```\n1\n```", "x = 1"),
        ("```python\nx = 1\n```\nIt prints\n```text\n1\n```", "x = 1"),
        ("```text\n1\n```", "1"),
        ("```markdown\n```python\nx = 1\n```\n```", "x = 1"),
        ("- so\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y"),
        ('```python\ndef f():\n    """\n    ```\n    f()\n    ```\n    """\n```', 'def f():\n    """\n    ```\n    f()\n    ```\n    """'),
        ("<think>```python\nx = 1\n```</think>```python\nx = 2\n```", "x = 2"),
        ("maybe ```python\nx = 1\n```\n</think>\n```python\nx = 2\n```", "x = 2"),
        ("<think>```python\nx = 1\n```</think> I give up.", None),
        ("<think>```python\nx = 1\n```", None),
        ("```python\nprint('<think>')\n```", "print('<think>')"),
        ("```python\nprint('</think>')\n```", "print('</think>')"),
        ("<think>a</think>\n```python\nprint('<think>b</think>')\n```\nThat is it.", "print('<think>b</think>')"),
        ("<think>no </think> yet\n```python\nx = 1\n```\n</think>```python\nx = 2\n```", "x = 2"),
        ("maybe\n```python\nx = 1\n</think>\n```python\nx = 2\n```", "x = 2"),
        ("<think>```python\nx = '</think>", None),
        ("```python3.11\nx = 1\n```\nprints\n```text\n1\n```", "x = 1"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1"),
        ("```python\nx = '\x0c'\n```", "x = '\x0c'"),
        ("Use ```x = 1``` here", None),
        ("```python\n\n```", None),
        ("```", None),
        ("", None),
        ("x = 1", None),
    ],
)  # fmt: skip
def test_the_last_fenced_block(text, program):
    assert extract_last_code_block(text) == program
    result = code_block_parser(text)
    assert result.action == program
    assert (result.reward, result.obs is None) == ((0.1, True) if program is not None else (-1.0, False))


@given(raw=anything | st.lists(st.sampled_from(["```", "~~~~", "`", "py", "\n", " ", "<think>", "</think>", "x"])).map("".join))
def test_the_last_fenced_block_is_part_of_the_text(raw):
    content = extract_last_code_block(raw)
    assert content is None or (content.strip() and content.split()[0] in raw)


@given(st.text("ab \n`~", max_size=30), st.sampled_from(["```", "~~~", "`````"]))
def test_a_block_is_found_again(content, mark):
    """Within a fence that is longer than any in it."""
    fence = mark[0] * 40
    found = extract_last_code_block(f"{mark[0] * 2} text\n{fence}python\n{content}\n{fence}\n{mark[:2]}")
    assert found == (content if content.strip() else None)
