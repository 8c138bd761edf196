"""A macro-batch as bytes, as it goes through a queue or to other ranks: the table of the core
compared with lists in msgpack and in JSON, from samples to bytes and back to a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from benches.python.contest import Contender, Contest
from benches.python.samples import list_items

from ludic import _core
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWItem

SAMPLES = 1000
_MSGPACK, _JSON = msgspec.msgpack, msgspec.json


class Sample(msgspec.Struct, array_like=True):
    """A sample as a codec without columns sends it."""

    input_ids: list[int]
    action_mask: list[int]
    token_logps: list[float]
    weight: float


def contests(samples: int = SAMPLES) -> Iterator[Contest]:
    items = list_items(samples)
    plain = [_plain(item) for item in items]
    table = _core.SampleTable.from_items(items)
    data = table.to_bytes()
    title = f"{samples} samples, {table.num_tokens} tokens"
    packed, text = _MSGPACK.encode(plain), _JSON.encode(plain)
    copy = bytearray(len(data))

    def memcpy() -> None:
        copy[:] = data

    yield Contest(
        f"Writing {title}",
        table.num_tokens,
        "token",
        [
            Contender("msgpack of lists", lambda: _MSGPACK.encode(plain)),
            Contender("JSON of lists", lambda: _JSON.encode(plain)),
            Contender("**ludic `to_bytes`**", table.to_bytes, repeats=5),
            Contender("memcpy of these bytes", memcpy, repeats=5),
        ],
    )
    msgpack_decoder, json_decoder = _MSGPACK.Decoder(list[Sample]), _JSON.Decoder(list[Sample])
    yield Contest(
        f"Reading {title} into a table",
        table.num_tokens,
        "token",
        [
            Contender("msgpack of lists, `from_items`", lambda: _table(msgpack_decoder.decode(packed))),
            Contender("JSON of lists, `from_items`", lambda: _table(json_decoder.decode(text)), _assert_same),
            Contender("**ludic `from_bytes`**", lambda: _core.SampleTable.from_bytes(data), _assert_same, repeats=5),
        ],
    )


def _plain(item: SAWItem) -> Sample:
    assert item.actor_logps is not None
    return Sample(item.input_ids, item.action_mask, item.actor_logps.token_logps, item.weight)


def _table(samples: list[Sample]) -> _core.SampleTable:
    return _core.SampleTable.from_items(
        [
            SAWItem(
                sample.input_ids,
                [1] * len(sample.input_ids),
                sample.action_mask,
                sample.weight,
                attachments=SampleAttachments(ActorTokenLogps(sample.token_logps)),
            )
            for sample in samples
        ]
    )


def _assert_same(got: _core.SampleTable, want: _core.SampleTable) -> None:
    np.testing.assert_array_equal(got.to_bytes(), want.to_bytes())


def report(samples: int = SAMPLES) -> str:
    """Bytes per token."""
    items = list_items(samples)
    plain = [_plain(item) for item in items]
    table = _core.SampleTable.from_items(items)
    sizes: dict[str, Any] = {
        "msgpack of lists": _MSGPACK.encode(plain),
        "JSON of lists": _JSON.encode(plain),
        "**ludic `to_bytes`**": table.to_bytes(),
    }
    rows = [f"| {name} | {len(data) / table.num_tokens:.2f} |" for name, data in sizes.items()]
    head = [f"### Size of {samples} samples, {table.num_tokens} tokens", "", "| contender | bytes/token |", "|---|---|"]
    return "\n".join([*head, *rows, ""])
