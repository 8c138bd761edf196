r"""Parsers: raw text of a model to an action, or to feedback and a penalty. They never raise on what a model wrote."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ludic.errors import ConfigError

Kind = Literal["inner", "remainder_after_prefix"]


@dataclass(frozen=True)
class ParseResult:
    """`action` is None where parsing failed; `obs` is then what the model is told."""

    action: str | None
    reward: float
    obs: str | None


Parser = Callable[[str], ParseResult]


def compose_parsers(*parsers: Parser) -> Parser:
    """Left to right: each parser gets the action of the one before, rewards add up, the first failure ends it."""

    def composed(raw: str) -> ParseResult:
        action, reward = raw, 0.0
        for parser in parsers:
            result = parser(action)
            reward += result.reward
            if result.action is None:
                return ParseResult(None, reward, result.obs)
            action = result.action
        return ParseResult(action, reward, None)

    return composed


def xml_parser(
    tag: str, *, exact: bool = False, kind: Kind = "inner", success_reward: float = 0.1, error_reward: float = -1.0
) -> Parser:
    """A parser for `<tag>...</tag>`, whatever the case.

    `inner`: the action is the text between the first pair of tags; with `exact` nothing but white space may stand around it.
    `remainder_after_prefix`: the text must open with the pair, and the action is what follows it.
    """
    if kind not in ("inner", "remainder_after_prefix"):
        raise ConfigError(f"Unknown kind {kind!r}; it must be 'inner' or 'remainder_after_prefix'")
    if kind == "remainder_after_prefix" and exact:
        raise ConfigError("exact=True is not supported with kind='remainder_after_prefix', which is anchored already")
    find = _inner(tag, exact) if kind == "inner" else _remainder(tag)

    def parse(raw: str) -> ParseResult:
        found, problem = find(raw)
        if found is None:
            return ParseResult(None, error_reward, f"Invalid action format: {problem}")
        return ParseResult(found, success_reward, None)

    return parse


Finder = Callable[[str], tuple[str | None, str]]
"""Text to (what was found, or None) and (what is wrong)."""


def _inner(tag: str, exact: bool) -> Finder:
    name = re.escape(tag)
    pair = re.compile(rf"<{name}>(.*?)</{name}>", re.IGNORECASE | re.DOTALL)
    whole = re.compile(rf"\s*<{name}>(.*)</{name}>\s*", re.IGNORECASE | re.DOTALL)
    tags = re.compile(rf"</?{name}>", re.IGNORECASE)

    def find(raw: str) -> tuple[str | None, str]:
        match = whole.fullmatch(raw) if exact else pair.search(raw)
        if match is None or (exact and tags.search(match.group(1))):
            only = "only " if exact else ""
            return None, f"Expected {only}<{tag}>...</{tag}>."
        text = match.group(1).strip()
        return (text, "") if text else (None, f"Empty <{tag}> tag.")

    return find


def _remainder(tag: str) -> Finder:
    name = re.escape(tag)
    prefix = re.compile(rf"\s*<{name}>.*?</{name}>(.*)", re.IGNORECASE | re.DOTALL)

    def find(raw: str) -> tuple[str | None, str]:
        match = prefix.fullmatch(raw)
        if match is None or not match.group(1):
            return None, f"Expected '<{tag}>...</{tag}>' followed by the answer."
        text = match.group(1).strip()
        return (text, "") if text else (None, f"Missing content after </{tag}>.")

    return find


def xml_tag_parser(tag: str, *, exact: bool = False, success_reward: float = 0.1, error_reward: float = -1.0) -> Parser:
    """`xml_parser` with `kind="inner"`."""
    return xml_parser(tag, exact=exact, kind="inner", success_reward=success_reward, error_reward=error_reward)


def think_prefix_parser(raw: str, *, success_reward: float = 0.1, error_reward: float = -1.0) -> ParseResult:
    """The answer after a leading `<think>...</think>`."""
    parse = xml_parser("think", kind="remainder_after_prefix", success_reward=success_reward, error_reward=error_reward)
    return parse(raw)


cot_prefix_parser = think_prefix_parser

_BOX = re.compile(r"\\boxed\s*\{")


def extract_last_boxed_content(raw: str) -> str | None:
    r"""The content of the last `\boxed{...}` whose braces balance, not stripped; None if there is none. `\{` and `\}` do not count."""
    for match in reversed(list(_BOX.finditer(raw))):
        end = _closing_brace(raw, match.end())
        if end is not None:
            return raw[match.end() : end]
    return None


def _closing_brace(text: str, start: int) -> int | None:
    """Position of the brace that closes the one before `start`."""
    depth, position = 1, start
    while position < len(text):
        char = text[position]
        if char == "\\" and text[position + 1 : position + 2] in ("{", "}", "\\"):
            position += 2
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return position
        position += 1
    return None


def boxed_parser(raw: str, *, success_reward: float = 0.1, error_reward: float = -1.0) -> ParseResult:
    r"""The stripped content of the last `\boxed{...}`."""
    content = extract_last_boxed_content(raw)
    if content is None:
        return ParseResult(None, error_reward, r"Invalid boxed answer: Expected \boxed{...}.")
    if not content.strip():
        return ParseResult(None, error_reward, r"Invalid boxed answer: Empty \boxed{}.")
    return ParseResult(content.strip(), success_reward, None)
