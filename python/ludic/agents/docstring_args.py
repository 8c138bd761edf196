"""What a docstring says of each parameter, in Google's style.

Args:
    city (str): Where to look,
        as a name.
"""

from __future__ import annotations

import re

_HEADING = re.compile(r"^(Args|Arguments|Parameters):\s*$", re.MULTILINE)
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


def described_args(doc: str) -> dict[str, str]:
    """Parameter -> description, on one line. `doc` is cleaned (`inspect.getdoc`); empty for one
    of another style."""
    heading = _HEADING.search(doc)
    found: dict[str, str] = {}
    level, name = 0, ""
    for line in doc[heading.end() :].splitlines() if heading else ():
        indent = len(line) - len(line.lstrip())
        if line.strip() and indent == 0:
            break  # the next section
        level = level or indent
        entry = _ENTRY.match(line.strip()) if indent == level else None
        if entry:
            name = entry[1]
            found[name] = entry[2]
        elif name and line.strip():
            found[name] = f"{found[name]} {line.strip()}".strip()
    return {name: said for name, said in found.items() if said}
