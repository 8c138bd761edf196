"""Objects whose own code runs while the core reads them. They can change what is read, but never
memory that is being read."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from ludic import _core
from ludic.errors import DataError, DataTypeError, LudicError
from ludic.training.types import SAWItem

SIZE = 1 << 14
SAMPLE = SAWItem(input_ids=[5, 6, 7], attention_mask=[1, 1, 1], action_mask=[0, 1, 1], weight=0.5)

Act = Callable[[], object]


class ActsWhenRead:
    """Behaves like the number 1 under every conversion, and calls `act` first."""

    def __init__(self, act: Act) -> None:
        self.act = act

    def __eq__(self, other: object) -> bool:
        self.act()
        return True

    def __hash__(self) -> int:
        return 1

    def __float__(self) -> float:
        self.act()
        return 1.0

    def __index__(self) -> int:
        self.act()
        return 1

    def __array__(self, *_: object, **__: object) -> np.ndarray[Any, Any]:
        self.act()
        return np.ones(SIZE, np.int64)

    def __buffer__(self, flags: int) -> memoryview:
        self.act()
        return memoryview(np.ones(SIZE, np.int64))


def spiteful_list(act: Act, at: int) -> list[Any]:
    values: list[Any] = [1] * SIZE
    values[at] = ActsWhenRead(act)
    return values


FIELDS = ["input_ids", "action_mask", "attention_mask", "token_logps"]
TRAPS: list[Callable[[Act], Any]] = [lambda act: spiteful_list(act, 0), lambda act: spiteful_list(act, SIZE - 1), ActsWhenRead]


@given(
    st.sampled_from(FIELDS),
    st.sampled_from([*FIELDS, "weight"]),
    st.sampled_from(TRAPS),
    st.sampled_from([np.int64, np.int32, np.uint8, np.int16, np.bool]),
)
def test_memory_released_while_a_sample_is_read_is_not_accessed(
    victim: str, trap: str, make: Callable[[Act], Any], dtype: type
) -> None:
    """The result is a table of the former values, with zeros for released memory, or one of our
    errors."""
    owner = np.ones(SIZE, np.float64 if victim == "token_logps" else dtype)
    fields: dict[str, Any] = {name: np.ones(SIZE, np.int64) for name in FIELDS}
    fields["token_logps"] = np.full(SIZE, -1.0)
    fields["weight"] = 1.0

    taken = []

    def free() -> None:
        if not owner.size:
            return
        size, kind = owner.size, owner.dtype
        owner.resize(0, refcheck=False)
        taken.extend(np.empty(size, kind) for _ in range(4))
        for array in taken:
            array.fill(0)

    fields[victim] = owner
    fields[trap] = ActsWhenRead(free) if trap == "weight" else make(free)
    logps = SimpleNamespace(token_logps=fields.pop("token_logps"))
    item = SimpleNamespace(**fields, attachments=SimpleNamespace(actor_logps=logps))
    try:
        table = _core.SampleTable.from_items([item])
    except (LudicError, IndexError):
        return
    batch = table.collate([0], 0)
    assert batch["input_ids"].shape == (1, SIZE)
    assert {name: set(values.ravel().tolist()) for name, values in batch.items() if name != "old_logp_action"} == {
        "input_ids": {1},
        "attention_mask": {1},
        "action_mask": {1.0},
        "weight": {1.0},
        "actor_logps": {1.0 if trap == "token_logps" else -1.0},
    }


@given(st.sampled_from(["input_ids", "action_mask"]), st.sampled_from(["action_mask", "weights", "offsets", "attention_mask"]))
def test_memory_released_while_columns_are_read_is_not_accessed(victim: str, trap: str) -> None:
    assume(victim != trap)
    owner = np.ones(SIZE, np.int64)
    columns: dict[str, Any] = {"input_ids": np.ones(SIZE, np.int64), "action_mask": np.ones(SIZE, np.int64), "offsets": [0, SIZE]}
    columns[victim] = owner

    def free() -> int:
        owner.resize(0, refcheck=False)
        return SIZE

    columns[trap] = spiteful_list(free, SIZE - 1) if trap.endswith("mask") else [ActsWhenRead(free)]
    with pytest.raises(DataError, match=r"has length|offsets"):
        _core.SampleTable.from_columns(**columns)


def item_with(**changes: Any) -> Any:
    fields = {name: getattr(SAMPLE, name) for name in ("input_ids", "attention_mask", "action_mask", "weight", "attachments")}
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError("of the object's own")])
def test_errors_that_are_not_about_the_value_are_raised_unchanged(error: Any) -> None:
    def fail() -> None:
        raise error

    class Failing:
        @property
        def input_ids(self) -> list[int]:
            raise error

    expected = error if isinstance(error, type) else type(error)
    for item in (item_with(input_ids=[5, ActsWhenRead(fail), 7]), item_with(weight=ActsWhenRead(fail)), Failing()):
        with pytest.raises(expected) as caught:
            _core.SampleTable.from_items([item])
        assert not isinstance(caught.value, LudicError)


def test_a_python_conversion_error_is_the_cause_of_ours() -> None:
    with pytest.raises(DataTypeError, match=r"input_ids\[1\] is 'six'") as caught:
        _core.SampleTable.from_items([item_with(input_ids=[5, "six", 7])])
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(DataTypeError, match="sample 0 is a SimpleNamespace") as caught:
        _core.SampleTable.from_items([SimpleNamespace()])
    assert isinstance(caught.value.__cause__, AttributeError)


@pytest.mark.parametrize("ones", [[np.ones(2), np.ones(2), np.ones(2)], [1, 1, np.ones(3)]])
def test_the_error_of_a_mask_with_incomparable_elements_names_it(ones: list[Any]) -> None:
    with pytest.raises(DataTypeError, match=r"attention_mask\[\d\] is array"):
        _core.SampleTable.from_items([replace(SAMPLE, attention_mask=ones)])


def test_attention_masks_accept_values_equal_to_one_and_otherwise_need_integers() -> None:
    for ones in ([1.0, 1.0, 1.0], [True, True, True], [1, 1.0, np.int64(1)]):
        table = _core.SampleTable.from_items([replace(SAMPLE, attention_mask=ones)])
        assert table.collate([0], 0)["attention_mask"].tolist() == [[1, 1, 1]]
    with pytest.raises(DataTypeError, match=r"attention_mask\[0\] is 1.0 \(float\).*integer"):
        _core.SampleTable.from_items([replace(SAMPLE, attention_mask=[1.0, 1.0, 0.0])])


def test_the_error_of_a_released_buffer_says_so() -> None:
    view = memoryview(b"\1\1\1")
    view.release()
    with pytest.raises(DataTypeError, match="released"):
        _core.SampleTable.from_items([replace(SAMPLE, action_mask=view)])


class Endless:
    """Claims a length of two but iterates forever."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> SAWItem:
        return SAMPLE


def test_endless_items_are_refused() -> None:
    with pytest.raises(DataError, match="len of 2, but yields more items"):
        _core.SampleTable.from_items(Endless())  # type: ignore[arg-type]


OUT_OF_MEMORY = textwrap.dedent("""
    import resource
    import numpy as np
    from ludic import _core

    lengths = [1] * 1500 + [1 << 20]
    offsets = np.cumsum([0, *lengths])
    ids = np.zeros(offsets[-1], np.int32)
    table = _core.SampleTable.from_columns(ids, ids, offsets)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), -1))
    for arena in (None, _core.Arena()):
        try:
            table.collate(np.arange(1501), 0, arena)
        except Exception as error:
            print(type(error).__mro__[-4:-1])
""")


@pytest.mark.skipif(sys.platform != "linux", reason="memory limits depend on the operating system")
def test_a_batch_beyond_available_memory_is_a_memory_error() -> None:
    """12 GB of ids with a limit of 1 GB."""
    done = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("MemoryError") == 2, done.stdout
