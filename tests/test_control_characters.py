"""What a terminal may show of a text."""

import unicodedata

from hypothesis import given, strategies as st

from ludic.errors import escape_controls

CATEGORIES_OF_COMMANDS = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Control and format characters, halves of surrogate pairs, what has no meaning, and separators of
lines and paragraphs."""


@given(st.text(st.characters() | st.characters(categories=sorted(CATEGORIES_OF_COMMANDS)), max_size=20))
def test_escaped_text_has_no_character_that_is_a_command_but_line_breaks(text):
    assert all(char == "\n" or unicodedata.category(char) not in CATEGORIES_OF_COMMANDS for char in escape_controls(text))


@given(st.text(st.characters(categories=["L", "M", "N", "P", "S", "Zs"])))
def test_text_without_such_characters_is_left_as_it_is(text):
    """The ideographic space too, which Python does not call printable."""
    assert escape_controls(text) == text


def test_a_caller_says_what_is_kept():
    assert escape_controls("a\x1b[2J\nb\tc\u202e\x07", keep="\n\t") == "a\\x1b[2J\nb\tc\\u202e\\x07"
    assert escape_controls("a\tb\n\u3000") == "a\\tb\n\u3000"
    assert escape_controls("a\nb", keep="") == "a\\nb"
