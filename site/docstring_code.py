"""Shows doctests of docstrings as code. Griffe calls `on_object` (`extensions` of mkdocs.yml)."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(r"(?:^|(?<=\n\n))(>>> .*?)(?=\n\n|\Z)", re.DOTALL)


class FencedDoctests(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\1\n```", obj.docstring.value)
