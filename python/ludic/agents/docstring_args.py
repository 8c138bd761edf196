"""Reads parameter descriptions from docstrings in Google style.

Args:
    city (str): Where to look,
        as a name.
"""

from __future__ import annotations

import re

_HEADING = re.compile(r"^(Args|Arguments|Parameters):\s*$", re.MULTILINE)
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


def parse_arg_descriptions(doc: str) -> dict[str, str]:
    """Parameter -> description on one line. `doc` must be cleaned (`inspect.getdoc`). Empty for
    docstrings in other styles."""
    heading = _HEADING.search(doc)
    descriptions: dict[str, str] = {}
    level, name = 0, ""
    for line in doc[heading.end() :].splitlines() if heading else ():
        indent = len(line) - len(line.lstrip())
        if line.strip() and indent == 0:
            break  # the next section
        level = level or indent
        entry = _ENTRY.match(line.strip()) if indent == level else None
        if entry:
            name = entry[1]
            descriptions[name] = entry[2]
        elif name and line.strip():
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return {name: description for name, description in descriptions.items() if description}
