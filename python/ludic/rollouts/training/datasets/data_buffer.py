"""Prompts, pass after pass, with a state from which a run goes on with the next prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Literal

from ludic.data.passes import Passes
from ludic.errors import ConfigError, ConfigTypeError, DataError, RequestsExhausted, check_value
from ludic.files.jsonl import read_jsonl

Changed = Literal["error", "grow"]
_DIGEST_BYTES = 8


class DataBuffer:
    """Gives prompts in passes: pass 0 in the order of the data, pass e in the order of
    `random.Random(seed + e)`. The list that is passed in is copied and never changed.

    >>> buffer = DataBuffer(["a", "b", "c"])
    >>> buffer.get_prompts(2), buffer.epoch_id, buffer.sample_offset
    (['a', 'b'], 0, 2)

    A pass ends when its last prompt is taken: after one more prompt the buffer is at epoch 1,
    offset 0.
    """

    def __init__(
        self, prompts: Sequence[Any], epoch_id: int = 0, sample_offset: int = 0, seed: int = 42, epochs: int | None = None
    ) -> None:
        """`prompts`: texts, lists of messages, or rows with an answer. `epoch_id`, `sample_offset`:
        where to begin. `epochs`: number of passes. None means no end."""
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Sequence):
            raise ConfigTypeError(f"prompts must be a list of prompts, not a {type(prompts).__name__}; one prompt is [prompt]")
        if not prompts:
            raise ConfigError("prompts is empty; a buffer needs at least one prompt")
        check_value("epochs", epochs, "None passes over the prompts without end", least=1, optional=True)
        self.prompts, self.seed, self.epochs = list(prompts), seed, epochs
        self._digests, self._incomparable = _digest_prefixes(self.prompts)
        self._passes = Passes(len(self.prompts), self._order)
        self._seek(self._passes, epoch_id, sample_offset)

    @property
    def position(self) -> int:
        """The number of prompts before the next one, over all passes; `at` takes it."""
        return self._passes.position

    @property
    def epoch_id(self) -> int:
        """The pass that the next prompt belongs to, from 0."""
        return self._passes.locate(self.position)[0]

    @property
    def sample_offset(self) -> int:
        """The number of prompts that were taken of this pass."""
        return self._passes.locate(self.position)[1]

    def get_prompts(self, n: int) -> list[Any]:
        """The next `n` prompts, over any number of passes. At the end of the last of `epochs` they
        are fewer; after it, RequestsExhausted is raised."""
        check_value("n", n, least=1)
        end = self._end()
        n = n if end is None else min(n, end - self.position)
        if n <= 0:
            raise RequestsExhausted(f"all {self.epochs} epochs of {len(self)} prompts were taken; set epochs=None to go on")
        return [self.prompts[row] for row in self._passes.take(n)]

    def at(self, position: int) -> Any:
        """The prompt at a position, taken already or not. It depends on the data and the seed
        only."""
        end = self._end()
        if end is not None and position >= end:
            raise RequestsExhausted(f"position {position} lies behind the last of {end} prompts in {self.epochs} epochs")
        return self.prompts[self._passes.at(position)]

    def __len__(self) -> int:
        return len(self.prompts)

    def _end(self) -> int | None:
        return None if self.epochs is None else self._passes.start_of(self.epochs)

    def _order(self, number: int) -> list[int]:
        """The order of a pass, over the rows that it has."""
        order = list(range(self._passes.length_of(number)))
        if number:
            Random(self.seed + number).shuffle(order)
        return order

    def save_state(self) -> dict[str, Any]:
        """The position, and what it is valid for: the seed, the number of prompts and their digest.
        `lengths` is added if the data has grown."""
        number, offset = self._passes.locate(self.position)
        lengths = self._passes.state_dict()["lengths"]
        return {
            "epoch_id": number,
            "sample_offset": offset,
            "seed": self.seed,
            "num_prompts": len(self),
            "digest": self._digest(len(self)),
            **({"lengths": lengths} if len(lengths) > 1 else {}),
        }

    def load_state(self, state: Mapping[str, Any], changed: Changed = "error") -> None:
        """Continue at the position in `state`. Raises ConfigError, and changes nothing, if the
        seed, the number of prompts or their content differs. `changed="grow"`: prompts were added
        behind the prompts of the state; the pass that has begun ends over the old ones, the next
        has all.

        Keys that `state` lacks are not checked.
        """
        check_value("changed", changed, choices=("error", "grow"))
        missing = [name for name in ("epoch_id", "sample_offset") if name not in state]
        if missing:
            raise ConfigError(f"the state has no {' and no '.join(missing)}; load what save_state returned")
        for name in ("epoch_id", "sample_offset", "num_prompts"):
            if isinstance(state.get(name, 0), bool) or not isinstance(state.get(name, 0), int):
                raise ConfigError(f"{name} of the state ({state[name]!r}) must be a whole number; load what save_state returned")
        saved = int(state.get("num_prompts", len(self)))
        self._check_same(state, saved, changed)
        passes = Passes(saved, self._order)
        if "lengths" in state:
            passes.load_state_dict({"position": 0, "lengths": state["lengths"]})
        self._seek(passes, state["epoch_id"], state["sample_offset"])
        passes.grow(len(self))
        self._passes = passes

    def _check_same(self, state: Mapping[str, Any], saved: int, changed: Changed) -> None:
        """Raise ConfigError, naming what differs, unless this is the data of the state."""
        if state.get("seed", self.seed) != self.seed:
            raise ConfigError(f"seed ({self.seed}) must be {state['seed']}, as saved; give that seed, or begin a new run")
        if saved != len(self) and not (changed == "grow" and saved < len(self)):
            remedy = "load_state(state, changed='grow') goes on with added prompts" if saved < len(self) else "put them back"
            raise ConfigError(f"the saved position belongs to num_prompts={saved}, here are {len(self)} prompts; {remedy}")
        digest = self._digest(saved)
        if state.get("digest", digest) != digest:
            which = "the prompts" if saved == len(self) else f"the first {saved} prompts"
            raise ConfigError(f"{which} differ (digest {state['digest']}, now {digest}); put the data back, or begin a new run")

    @staticmethod
    def _seek(passes: Passes, epoch_id: int, sample_offset: int) -> None:
        """Set the position. Example: epoch 2, offset 1 of 3 prompts is 7."""
        if epoch_id < 0 or not 0 <= sample_offset < passes.length_of(epoch_id):
            length = passes.length_of(max(epoch_id, 0))
            raise ConfigError(f"epoch_id ({epoch_id}) must be >= 0, and sample_offset ({sample_offset}) from 0 to {length - 1}")
        passes.position = passes.start_of(epoch_id) + sample_offset

    def _digest(self, count: int) -> str:
        """16 hex digits that depend on the first `count` prompts and their order, as they were
        given: what a `generate_fn` writes into a prompt later does not change them."""
        if self._incomparable is not None and count > len(self._digests) // _DIGEST_BYTES:
            raise self._incomparable
        return self._digests[_DIGEST_BYTES * (count - 1) : _DIGEST_BYTES * count].hex()


def _digest_prefixes(prompts: Sequence[Any]) -> tuple[bytes, DataError | None]:
    """(digests of the first 1, 2, ... prompts, one after another; the error of the first prompt
    that has none). 10,000 prompts take 80 kB. Objects that JSON cannot express count by their type
    alone."""
    digest, prefixes = hashlib.blake2b(digest_size=_DIGEST_BYTES), bytearray()
    for index, prompt in enumerate(prompts):
        try:
            digest.update(json.dumps(prompt, sort_keys=True, default=_name_or_values).encode() + b"\n")
        except (TypeError, ValueError) as error:
            message = (
                f"prompt {index} cannot be compared with a later run's ({error}); give text, messages or a row of JSON values"
            )
            return bytes(prefixes), DataError(message)
        prefixes += digest.digest()
    return bytes(prefixes), None


def _name_or_values(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else f"<{type(value).__qualname__}>"


def load_prompts_from_jsonl(path: str | Path, prompt_key: str = "prompt", limit: int | None = None) -> list[Any]:
    """The values of `prompt_key`, one of each line, at most the first `limit`. A line without that
    key gives the whole row; blank lines give nothing."""
    check_value("limit", limit, "None reads every line", least=1, optional=True)
    prompts = [row.get(prompt_key, row) for _, row in islice(read_jsonl(path), limit)]
    if not prompts:
        raise DataError(f"{path} has no prompts; every line that is not blank is one")
    return prompts


def load_prompts_from_list(prompts: Sequence[Any]) -> list[Any]:
    """A copy of the list."""
    return list(prompts)


def create_buffer_from_jsonl(
    path: str | Path, prompt_key: str = "prompt", limit: int | None = None, seed: int = 42
) -> DataBuffer:
    """A buffer over the prompts of a file; see `load_prompts_from_jsonl`."""
    return DataBuffer(load_prompts_from_jsonl(path, prompt_key, limit), seed=seed)
