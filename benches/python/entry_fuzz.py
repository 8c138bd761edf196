"""Damaged and hostile entries of a queue: how many are refused, and the processor time of one.

    python -m benches.python.entry_fuzz --count 100000

Kinds: `random` bytes; `changed`, one to four bytes of a right entry differ; `cut` off; `pickle`, a
pickle that would make a file; `forged`, a changed body with the right checksum, as only somebody
with the queue's password can send it. A forged entry may be a right one again, with another reward,
say; any other error than EntryError counts as `broken`. Exits with 1 if there is one, if anything
but a forged entry is accepted, or if the pickle was run.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import xxhash
from benches.python.queue_speed import make_group

from ludic.training.queue.entries import EntryError, SampleGroup, decode_group, decode_samples, encode_group, encode_samples
from ludic.training.types import SAWItem

KINDS = ("random", "changed", "cut", "pickle", "forged")
HEADER = 6
"""Bytes before the checksum, which has 16."""


class Bomb:
    """Its pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def hostile(kind: str, whole: bytes, pickled: bytes, rng: random.Random) -> bytes:
    """An entry of this kind made of a right one."""
    if kind == "random":
        return rng.randbytes(rng.randrange(2000))
    if kind == "pickle":
        return pickled if rng.random() < 0.5 else sealed(whole, pickled)
    if kind == "cut":
        return whole[: rng.randrange(len(whole))]
    changed = bytearray(whole)
    start = HEADER + 16 if kind == "forged" else 0
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(start, len(changed))] ^= rng.randint(1, 255)
    return sealed(whole, bytes(changed)[HEADER + 16 :]) if kind == "forged" else bytes(changed)


def sealed(whole: bytes, body: bytes) -> bytes:
    return whole[:HEADER] + xxhash.xxh3_128_digest(body) + body


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python.entry_fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, counts, slowest_ms = random.Random(options.seed), Counter[str](), 0.0
    sample = SAWItem([5, 6, 7], [1, 1, 1], [0, 1, 1], 0.5, {"rollout_id": "r", "total_reward": 1.0})
    forms = [
        (encode_group(make_group(0)), decode_group),
        (encode_samples(SampleGroup("producer", 3, [sample] * 8)), decode_samples),
    ]
    with tempfile.TemporaryDirectory() as folder:
        trap = Path(folder) / "trap"
        pickled = pickle.dumps(Bomb(trap))
        for number in range(options.count):
            kind, (whole, decode) = KINDS[number % len(KINDS)], rng.choice(forms)
            payload = hostile(kind, whole, pickled, rng)
            started = time.thread_time()
            try:
                decode(payload)
            except EntryError:
                counts[f"{kind}_refused"] += 1
            except Exception as error:
                counts["broken"] += 1
                print(f"{kind}: {type(error).__name__}: {error}", file=sys.stderr)
            else:
                counts[f"{kind}_accepted"] += 1
            slowest_ms = max(slowest_ms, 1e3 * (time.thread_time() - started))
        executed = trap.exists()
    print(json.dumps({"entries": options.count, **counts, "executed": executed, "slowest_ms": round(slowest_ms, 1)}))
    accepted = sum(count for name, count in counts.items() if name.endswith("_accepted") and not name.startswith("forged"))
    sys.exit(bool(executed or counts["broken"] or accepted))


if __name__ == "__main__":
    main()
