"""Random edits of a saved state, as a damaged or hand-edited checkpoint has them."""

from __future__ import annotations

import json
import random
from typing import Any

ODD = [None, True, -1, 0, 1, 7, 10**9, 2.5, "", "0", "x", [], {}, [1], {"a": 1}]
"""What stands in the place of a value."""


def edit(state: Any, rng: random.Random, *, keep: tuple[str, ...] = ()) -> Any:
    """A copy of the state with one change: a value is replaced, changed a little, removed, doubled,
    or a key is added. Nothing below the keys `keep` changes."""
    copy = json.loads(json.dumps(state))
    places = list(_places(copy, keep))
    container, key = rng.choice(places)
    value = container[key]
    kind = rng.choice(["replace", "nudge", "remove", "double"])
    if kind == "remove":
        del container[key]
    elif kind == "double" and isinstance(container, list):
        container.insert(key, json.loads(json.dumps(value)))
    elif kind == "double":
        container[rng.choice(["note", "0", "1", "2"])] = json.loads(json.dumps(value))
    elif kind == "nudge" and isinstance(value, int):
        container[key] = value + rng.choice([-1, 1])
    elif kind == "nudge" and isinstance(value, list):
        rng.shuffle(value)
    elif kind == "nudge" and isinstance(value, str) and value:
        place = rng.randrange(len(value))
        container[key] = value[:place] + rng.choice("aZ9=") + value[place + 1 :]
    else:
        container[key] = rng.choice(ODD)
    return copy


def _places(value: Any, keep: tuple[str, ...]) -> Any:
    """All (container, key or index) in the value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        if key not in keep:
            yield value, key
            yield from _places(value[key], keep)
