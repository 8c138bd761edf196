"""Parsers turn a model's raw text into an action, or into feedback and a penalty. They never raise,
whatever the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ludic.errors import ConfigError

Kind = Literal["inner", "remainder_after_prefix"]


@dataclass(frozen=True)
class ParseResult:
    """The action and the reward for its format. If parsing failed, `action` is None and `obs` is
    the feedback for the model."""

    action: str | None
    reward: float
    obs: str | None


Parser = Callable[[str], ParseResult]


def compose_parsers(*parsers: Parser) -> Parser:
    """A parser that applies the parsers from left to right. Each gets the action of the previous
    one, rewards are added up, and the first failure is the result."""

    def parse_all(raw: str) -> ParseResult:
        action, reward = raw, 0.0
        for parser in parsers:
            result = parser(action)
            reward += result.reward
            if result.action is None:
                return ParseResult(None, reward, result.obs)
            action = result.action
        return ParseResult(action, reward, None)

    return parse_all


def xml_parser(
    tag: str, *, exact: bool = False, kind: Kind = "inner", success_reward: float = 0.1, error_reward: float = -1.0
) -> Parser:
    """A parser for `<tag>...</tag>`, ignoring case.

    With kind `inner` the action is the text inside the first pair of tags; with `exact` only white
    space may surround the pair. With `remainder_after_prefix` the text must start with the pair,
    and the action is the text after it.
    """
    if kind not in get_args(Kind):
        raise ConfigError(f"Unknown kind {kind!r}; it must be one of {', '.join(get_args(Kind))}")
    if kind == "remainder_after_prefix" and exact:
        raise ConfigError("exact=True is not supported with kind='remainder_after_prefix', which must match at the start anyway")
    # A single pattern for the pair would take quadratic time on text that repeats the opening tag.
    opening, closing = (re.compile(f"<{slash}{re.escape(tag)}>", re.IGNORECASE) for slash in ("", "/"))

    def find_inner(raw: str) -> tuple[str | None, str]:
        """(content or None, the fault)."""
        expected, text = f"Expected {'only ' if exact else ''}<{tag}>...</{tag}>.", raw.strip() if exact else raw
        start = opening.match(text) if exact else opening.search(text)
        end = closing.search(text, start.end()) if start else None
        if start is None or end is None:
            return None, expected
        if exact and (end.end() < len(text) or opening.search(text, start.end())):
            return None, expected
        inner = text[start.end() : end.start()].strip()
        return (inner, "") if inner else (None, f"Empty <{tag}> tag.")

    def find_remainder(raw: str) -> tuple[str | None, str]:
        text = raw.lstrip()
        start = opening.match(text)
        end = closing.search(text, start.end()) if start else None
        if end is None or end.end() == len(text):
            return None, f"Expected '<{tag}>...</{tag}>' followed by the answer."
        remainder = text[end.end() :].strip()
        return (remainder, "") if remainder else (None, f"Missing content after </{tag}>.")

    def parse(raw: str) -> ParseResult:
        content, problem = find_inner(raw) if kind == "inner" else find_remainder(raw)
        if content is None:
            return ParseResult(None, error_reward, f"Invalid action format: {problem}")
        return ParseResult(content, success_reward, None)

    return parse


def xml_tag_parser(tag: str, *, exact: bool = False, success_reward: float = 0.1, error_reward: float = -1.0) -> Parser:
    """`xml_parser` with `kind="inner"`."""
    return xml_parser(tag, exact=exact, kind="inner", success_reward=success_reward, error_reward=error_reward)


def think_prefix_parser(raw: str, *, success_reward: float = 0.1, error_reward: float = -1.0) -> ParseResult:
    """The answer after a leading `<think>...</think>`."""
    parse = xml_parser("think", kind="remainder_after_prefix", success_reward=success_reward, error_reward=error_reward)
    return parse(raw)


cot_prefix_parser = think_prefix_parser

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\[{}\\]|[{}]")


def extract_last_boxed_content(raw: str) -> str | None:
    r"""The content of the last `\boxed{...}` with balanced braces, not stripped; None if there is
    none. `\{` and `\}` do not count as braces."""
    closes = _closing_braces(raw)
    boxes = [match.end() for match in _BOX.finditer(raw) if match.end() - 1 in closes]
    return raw[boxes[-1] : closes[boxes[-1] - 1]] if boxes else None


def _closing_braces(text: str) -> dict[int, int]:
    r"""Position of each opening brace that is closed -> position of its closing brace. A backslash
    escapes a brace or a backslash.

    Example: `{a{b}` gives `{2: 4}`.
    """
    open_braces: list[int] = []
    closes: dict[int, int] = {}
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            open_braces.append(match.start())
        elif match.group() == "}" and open_braces:
            closes[open_braces.pop()] = match.start()
    return closes


def boxed_parser(raw: str, *, success_reward: float = 0.1, error_reward: float = -1.0) -> ParseResult:
    r"""The stripped content of the last `\boxed{...}`."""
    content = extract_last_boxed_content(raw)
    if content is None:
        return ParseResult(None, error_reward, r"Invalid boxed answer: Expected \boxed{...}.")
    if not content.strip():
        return ParseResult(None, error_reward, r"Invalid boxed answer: Empty \boxed{}.")
    return ParseResult(content.strip(), success_reward, None)


_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})(.*)")
PYTHON_TAGS = {"python", "python3", "py", "py3", "{python}", "{.python}"}
_DEEPEST_FENCE = 3
_VERSION = re.compile(r"^(python|py)[\d.]+$")
_THOUGHT = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)


def extract_last_code_block(raw: str) -> str | None:
    """The content of the last fenced block of Python, or else of the last without a language, or
    else of the last one; None if no block has content.

    A fence is three or more backticks or tildes. As many of the same or more close it, unless they
    are indented by four or more further than it, as in a docstring; a fence that names a language
    begins a new block, so that one that was not closed, or has blocks inside, is left out. A block
    at the end need not be closed. What comes before the last `</think>` is no answer, nor is a
    thought that does not end; one within a line of a block that follows the thought is the
    program's. Lines lose the indentation of their fence, and `\r`. `python3.11` counts as `python`.
    """
    thoughts = list(_THOUGHT.finditer(raw))
    if thoughts and not thoughts[-1][1] and not raw[: thoughts[-1].start()].strip():
        return None
    closed, unclosed = _scan_fences(raw[_end_of_thoughts(raw, thoughts) :])
    blocks = [block for block in [*closed, *([unclosed] if unclosed else [])] if block[1].strip()]
    wanted = (
        [block for block in blocks if PYTHON_TAGS & {block[0], _VERSION.sub(r"\1", block[0])}]
        or [block for block in blocks if not block[0]]
        or blocks
    )
    return wanted[-1][1] if wanted else None


def _end_of_thoughts(raw: str, tags: Sequence[re.Match[str]]) -> int:
    """Where the answer begins: after the last `</think>` that is not part of a program.

    Example: 16 for "<think>a</think>", also if the lines "```py", "print('</think>')" follow.
    """
    end, is_thinking = 0, False
    for tag in tags:
        if not is_thinking and _scan_fences(raw[end : tag.start()])[1] is not None:  # in a block
            before, after = raw[: tag.start()].rpartition("\n")[2], raw[tag.end() :].partition("\n")[0]
            if before.strip() or after.strip():
                break
        if tag[1]:
            end = tag.end()
        is_thinking = not tag[1]
    return end


def _scan_fences(text: str) -> tuple[list[tuple[str, str]], tuple[str, str] | None]:
    """(the blocks that are closed, the one that the text ends in or None). A block is (language in
    small letters, content).

    Example: of "```py", "x = 1", "```", these three lines, it is `([("py", "x = 1")], None)`.
    """
    blocks: list[tuple[str, str]] = []
    fence, language, indent, lines = "", "", 0, list[str]()
    for line in text.replace("\r", "").split("\n"):
        match = _FENCE.match(line)
        if match is not None and (match[2][0] == "`" and "`" in match[3]):
            match = None  # code within a line
        if match is not None and fence and not (match[2].startswith(fence) and len(match[1]) <= indent + _DEEPEST_FENCE):
            match = None
        if match is None:
            lines.append(line[min(indent, len(line) - len(line.lstrip(" \t"))) :])
        elif fence and not match[3].strip():
            blocks.append((language, "\n".join(lines)))
            fence = ""
        else:
            fence, language, indent, lines = match[2], (match[3].split() or [""])[0].lower(), len(match[1]), []
    return blocks, (language, "\n".join(lines)) if fence else None


def code_block_parser(raw: str, *, success_reward: float = 0.1, error_reward: float = -1.0) -> ParseResult:
    """The program in the last fenced block (`extract_last_code_block`)."""
    content = extract_last_code_block(raw)
    if content is None:
        return ParseResult(None, error_reward, "Invalid code: Expected a program in a ```python block.")
    return ParseResult(content, success_reward, None)
