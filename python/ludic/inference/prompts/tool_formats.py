"""How models write calls of tools: the formats of the known families, and the one that a chat
template writes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludic.types import Message

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""
Tools = Sequence[Mapping[str, Any]]
LONGEST_CALL = 2**20
"""Characters of the arguments of a call."""
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls.

    >>> FORMATS["hermes"].read('So.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    (3, [('add', {'a': 1})])
    """

    name: str
    opening: str
    """The text with which the first call begins; as a pattern."""
    parse: Callable[[str, Tools], list[Call]]
    """The calls of the text from `opening` on. Raises ValueError for malformed ones."""
    tokens: Sequence[str] = ()
    """Its tokens that may be special ones, which are decoded then."""

    def read(self, text: str, tools: Tools = ()) -> tuple[int, list[Call]]:
        """(where the calls begin, the calls) of an answer; (its length, []) if it has none, or if
        one of them is malformed. Never raises. The types of arguments that are written as plain
        text are those of the tools' schemas."""
        start, calls, _ = self._find(text, tools)
        return (start, calls) if calls else (len(text), [])

    def _find(self, text: str, tools: Tools) -> tuple[int, list[Call], str]:
        """(where the calls begin, the calls, why they cannot be read)."""
        begun = re.search(self.opening, text)
        if begun is None:
            return len(text), [], ""
        try:
            calls = self.parse(text[begun.start() :], tools)
            json.dumps(calls, ensure_ascii=False, allow_nan=False).encode()  # half of a surrogate pair cannot be encoded
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            return begun.start(), [], str(error) or type(error).__name__
        valid = all(isinstance(name, str) and name and isinstance(arguments, dict) for name, arguments in calls)
        fault = "" if calls and valid else "it has no name, or its arguments are no object"
        return begun.start(), [] if fault else calls, fault

    def message(self, text: str, tools: Tools = (), *, first_id: int = 0, keep_malformed: bool = False) -> Message:
        """The answer as an OpenAI message: `content`, and `tool_calls` if the text has any.

        `content` is then the text before the first call, or None. Ids count up from `first_id` and
        have nine letters and digits, which the strictest templates require. One malformed call
        makes the whole text an answer without calls, as on servers. With `keep_malformed` a text
        with the format's tags has one call instead, with `error`, the `text` from the tag on, and
        without a name and arguments.
        """
        start, calls, fault = self._find(text, tools)
        if not calls and not (fault and keep_malformed and any(tag in text for tag in self.tokens)):
            return {"role": "assistant", "content": text}
        written = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls] or [("", "{}")]
        made: list[dict[str, Any]] = [
            {"id": f"call{first_id + number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(written)
        ]
        if fault:
            made[0] |= {"error": fault, "text": text[start:]}
        return {"role": "assistant", "content": text[:start].rstrip() or None, "tool_calls": made}


def completion_finish_reason(finish_reason: str, message: Message) -> str:
    """`tool_calls`, as in OpenAI's interface, for an answer with tool calls that was not cut off;
    else `finish_reason`."""
    return "tool_calls" if "tool_calls" in message and finish_reason == "stop" else finish_reason


def count_tool_calls(messages: Sequence[Message]) -> int:
    """The number of tool calls in a conversation."""
    return sum(len(message.get("tool_calls") or ()) for message in messages)


def _hermes(text: str, tools: Tools) -> list[Call]:
    """`<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`: Hermes, Qwen 2.5 and 3."""
    calls, start = [], 0
    while start >= 0:
        call, end = _decode(text, start + len("<tool_call>"))
        end = _after(r"\s*</tool_call>", text, end)
        calls.append(_named(call, "arguments"))
        start = text.find("<tool_call>", end)
    return calls


def _xml(text: str, tools: Tools) -> list[Call]:
    """`<tool_call><function=add><parameter=a>1</parameter></function></tool_call>`: Qwen 3 Coder
    and 3.5."""
    called = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
    return _tagged(text, called, re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL), tools)


def _glm(text: str, tools: Tools) -> list[Call]:
    """`<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`: GLM 4.5."""
    called = re.compile(r"\s*([^\s<{]+)\s*((?:<arg_key>.*)?)", re.DOTALL)
    return _tagged(text, called, re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL), tools)


def _mistral(text: str, tools: Tools) -> list[Call]:
    """`[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]`: Mistral, up to version 7 of its
    tokenizer."""
    made, _ = _decode(text, len("[TOOL_CALLS]"))
    if not isinstance(made, list):
        raise ValueError("not a list")
    return [_named(call, "arguments") for call in made]


def _mistral_named(text: str, tools: Tools) -> list[Call]:
    """`[TOOL_CALLS]add[ARGS]{"a": 1}`: Mistral, from version 11 of its tokenizer on."""
    calls = []
    for written in text.split("[TOOL_CALLS]")[1:]:
        name, brace, _ = written.partition("{")
        if not brace:
            raise ValueError("a call has no arguments")
        calls.append((name.removesuffix("[ARGS]").strip(), _decode(written, len(name))[0]))
    return calls


def _deepseek(text: str, tools: Tools) -> list[Call]:
    """A name and arguments between DeepSeek's tokens; as a block of JSON up to V3."""
    calls = []
    for written in text.split("<｜tool▁call▁begin｜>")[1:]:
        begun = re.match(r"(?:function<｜tool▁sep｜>)?([^<\n]+)(?:<｜tool▁sep｜>|\n```json\n)", written)
        if begun is None:
            raise ValueError("a call has no name")
        calls.append((begun[1], _decode(written, begun.end())[0]))
    return calls


def _harmony(text: str, tools: Tools) -> list[Call]:
    """` to=functions.add<|channel|>commentary json<|message|>{"a": 1}`: gpt-oss."""
    begin = r"to=functions\.([\w.-]+)(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>"
    return [(each[1], _decode(text, each.end())[0]) for each in re.finditer(begin, text)]


def _pythonic(text: str, tools: Tools) -> list[Call]:
    """`[add(a=1), now()]`: Llama 4, LFM2. The values are literals; nothing is executed."""
    written = text.strip().removeprefix("<|tool_call_start|>").removesuffix("<|tool_call_end|>")
    tree = ast.parse(written, mode="eval").body
    if not isinstance(tree, ast.List):
        raise ValueError("not a list of calls")
    calls = []
    for call in tree.elts:
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("not a call with named arguments")
        if any(each.arg is None for each in call.keywords):
            raise ValueError("arguments without a name")
        arguments = {str(each.arg): ast.literal_eval(_Literals().visit(each.value)) for each in call.keywords}
        calls.append((call.func.id, json.loads(json.dumps(arguments, allow_nan=False))))
    return calls


class _Literals(ast.NodeTransformer):
    """Makes constants of the names `true`, `false` and `null`."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        known = {"true": True, "false": False, "null": None}
        return ast.Constant(known[node.id]) if node.id in known else node


def _llama(text: str, tools: Tools) -> list[Call]:
    """`{"name": "add", "parameters": {"a": 1}}`, several after semicolons: Llama 3.1 and later."""
    calls, position = [], len(text) - len(text.lstrip().removeprefix("<|python_tag|>"))
    while position < len(text):
        call, position = _decode(text, position)
        calls.append(_named(call, "parameters"))
        position = _after(r"[\s;]*", text, position)
    return calls


def _gemma(text: str, tools: Tools) -> list[Call]:
    """`<|tool_call>call:add{a:1,b:<|"|>x<|"|>}<tool_call|>`: Gemma 4. The text between its quotes
    is taken as it is; keys have no quotes."""
    calls = []
    for written in text.split("<|tool_call>")[1:]:
        name, _, arguments = written.partition("<tool_call|>")[0].partition("{")
        texts = ("{" + arguments).split('<|"|>')
        texts[::2] = [re.sub(r"([\w.-]+)\s*:", r'"\1":', part) for part in texts[::2]]
        texts[1::2] = [json.dumps(part) for part in texts[1::2]]
        if not name.startswith("call:"):
            raise ValueError("a call has no name")
        calls.append((name.removeprefix("call:").strip(), json.loads("".join(texts))))
    return calls


FORMATS = {
    made.name: made
    for made in (
        ToolFormat("hermes", "<tool_call>", _hermes, ["<tool_call>"]),
        ToolFormat("xml", "<tool_call>", _xml, ["<tool_call>"]),
        ToolFormat("glm", "<tool_call>", _glm, ["<tool_call>"]),
        ToolFormat("mistral", r"\[TOOL_CALLS\]\s*\[", _mistral, ["[TOOL_CALLS]"]),
        ToolFormat("mistral named", r"\[TOOL_CALLS\]", _mistral_named, ["[TOOL_CALLS]", "[ARGS]"]),
        ToolFormat("deepseek", "<｜tool▁calls?▁begin｜>", _deepseek, ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"]),
        ToolFormat(
            "harmony",
            r"(?:<\|start\|>assistant|<\|channel\|>commentary)? to=functions\.",
            _harmony,
            ["<|message|>", "<|channel|>"],
        ),
        ToolFormat("gemma", r"<\|tool_call>", _gemma, ["<|tool_call>", "<tool_call|>", '<|"|>']),
        ToolFormat("pythonic", r"<\|tool_call_start\|>|\A\s*\[\w+\(", _pythonic, ["<|tool_call_start|>", "<|tool_call_end|>"]),
        ToolFormat("llama", r"\A\s*(?:<\|python_tag\|>)?\s*\{", _llama, ["<|python_tag|>"]),
    )
}
"""Name -> format, in the order in which they are tried."""


def _decode(text: str, position: int) -> tuple[Any, int]:
    """The JSON value at a position, after white space, and where it ends. Raises ValueError."""
    return _DECODER.raw_decode(text, _after(r"\s*", text, position))


def _after(pattern: str, text: str, position: int) -> int:
    """Where the pattern ends that begins at a position. Raises ValueError if it does not."""
    match = re.compile(pattern).match(text, position)
    if match is None:
        raise ValueError(pattern.removeprefix(r"\s*") + " is missing")
    return match.end()


def _named(call: Any, key: str) -> Call:
    if not isinstance(call, dict) or "name" not in call or key not in call:
        raise ValueError(f"no name or no {key}")
    return call["name"], call[key]


def _tagged(text: str, called: re.Pattern[str], written: re.Pattern[str], tools: Tools) -> list[Call]:
    """Calls whose arguments are plain texts between tags; each gets the type of its schema."""
    calls: list[Call] = []
    start = 0
    while (start := text.find("<tool_call>", start)) >= 0:
        end = text.find("</tool_call>", start)
        found = None if end < 0 else called.fullmatch(text, start + len("<tool_call>"), end)
        if found is None or len(found[2]) > LONGEST_CALL:
            raise ValueError("a call is malformed")
        name, pairs = found[1], written.findall(found[2])
        calls.append((name, {key: _typed(value, _schema_of(tools, name, key)) for key, value in pairs}))
        start = end
    return calls


def _schema_of(tools: Tools, name: str, key: str) -> Any:
    """The schema of a tool's parameter; None if it has none."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties.get(key) if isinstance(properties, Mapping) else None
    return None


def _typed(text: str, schema: Any) -> Any:
    """The value that a text stands for: itself where the schema admits text, else its JSON."""
    admitted = _types(schema)
    if "string" in admitted:
        return None if text == "null" and "null" in admitted else text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _types(schema: Any) -> set[str]:
    """The types that a schema admits, as far as it says."""
    if not isinstance(schema, Mapping):
        return set()
    own = schema.get("type")
    types = {own} if isinstance(own, str) else {each for each in own if isinstance(each, str)} if isinstance(own, list) else set()
    if isinstance(schema.get("enum"), list) and any(isinstance(each, str) for each in schema["enum"]):
        types.add("string")
    for name in ("anyOf", "oneOf"):
        types = types.union(*map(_types, schema[name])) if isinstance(schema.get(name), list) else types
    return types
