"""The cache of a batch, compared with a list of columns for each row."""

import pytest
import torch
from hypothesis import given, strategies as st
from transformers.cache_utils import DynamicCache

from ludic.inference.local.row_cache import LEAST_COLUMNS, Groups, RowCache

HEADS, SIZE, LAYERS = 2, 3, 2


def draw(generator, rows, columns):
    return torch.randn(rows, HEADS, columns, SIZE, generator=generator)


def make(prompt_of_row, *, share, limit=40, length=5, seed=0):
    """A cache, and for each layer the keys of each row as they should be; values are minus the
    keys."""
    generator = torch.Generator().manual_seed(seed)
    prompts = max(prompt_of_row) + 1
    keys = [draw(generator, prompts, length) for _ in range(LAYERS)]
    cache = RowCache(DynamicCache([(k, -k) for k in keys]), torch.tensor(prompt_of_row), limit=limit, share=share)
    return cache, [[k[prompt] for prompt in prompt_of_row] for k in keys], generator


def append(cache, expected, generator, columns=1):
    for i, layer in enumerate(expected):
        new = draw(generator, len(layer), columns)
        cache.update(new, -new, i)
        layer[:] = [torch.cat([row, more], dim=1) for row, more in zip(layer, new, strict=True)]


def assert_holds(cache, expected):
    rows = torch.arange(len(expected[0]))
    for (keys, values), wanted in zip(cache.read_rows(rows), expected, strict=True):
        assert torch.equal(keys, torch.stack(wanted))
        assert torch.equal(values, -torch.stack(wanted))
    assert cache.get_seq_length() == expected[0][0].shape[1]
    assert cache.get_mask_sizes(1, 0) == (expected[0][0].shape[1] + 1, 0)


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=9),
    st.booleans(),
    st.lists(st.one_of(st.integers(1, 20), st.lists(st.booleans(), min_size=9, max_size=9)), max_size=8),
)
def test_rows_keep_their_columns_while_columns_come_and_rows_leave(prompt_of_row, share, events):
    prompt_of_row = [sorted(set(prompt_of_row)).index(p) for p in prompt_of_row]
    cache, expected, generator = make(prompt_of_row, share=share)
    for event in events:
        if isinstance(event, int):
            append(cache, expected, generator, event)
            continue
        alive = torch.tensor(event[: len(expected[0])])
        if not alive.any():
            continue
        order = cache.keep(alive).tolist()
        assert sorted(order) == alive.nonzero().squeeze(1).tolist()
        expected = [[layer[i] for i in order] for layer in expected]
        assert_holds(cache, expected)
    assert_holds(cache, expected)


def test_columns_are_appended_in_place():
    cache, expected, generator = make([0, 0, 1], share=True, limit=64)
    places = set()
    for _ in range(64):
        append(cache, expected, generator)
        places.add(cache.layers[0].keys.data_ptr())
    assert_holds(cache, expected)
    # Room for 16, then 32 and 64 columns: three buffers for 64 columns.
    assert LEAST_COLUMNS == 16
    assert len(places) == 3
    assert cache.layers[0].room == 0


def test_a_row_that_leaves_moves_only_the_row_that_takes_its_place():
    cache, expected, generator = make([0, 0, 0, 0], share=True)
    append(cache, expected, generator)
    before = cache.layers[0].keys.data_ptr()
    assert cache.keep(torch.tensor([True, False, True, True])).tolist() == [0, 3, 2]
    assert cache.layers[0].keys.data_ptr() == before
    assert_holds(cache, [[layer[i] for i in (0, 3, 2)] for layer in expected])


def test_buffers_of_rows_that_left_are_given_back():
    cache, expected, generator = make([0] * 8, share=True)
    append(cache, expected, generator)
    cache.keep(torch.arange(8) < 4)
    # 4 of 8 rows, one column and room for 16, of float32.
    assert cache.layers[0].keys.untyped_storage().nbytes() == 4 * HEADS * (1 + LEAST_COLUMNS) * SIZE * 4


def test_shared_prompts_are_not_copied_and_unused_ones_are_dropped():
    prompts = draw(torch.Generator().manual_seed(0), 4, 5)
    cache = RowCache(DynamicCache([(prompts, prompts)]), torch.tensor([0, 0, 1, 2, 3, 3]), limit=9, share=True)
    held = cache.layers[0].prompt[0].data_ptr()
    cache.keep(torch.tensor([True, True, True, True, True, False]))
    assert cache.layers[0].prompt[0].data_ptr() == held
    cache.keep(torch.tensor([False, False, True, True, True]))  # prompt 0 has no rows: 3 of 4 are used
    assert torch.equal(cache.layers[0].prompt[0], prompts[[1, 2, 3]])


def test_slots_of_groups():
    # Prompts a, b of rows a, b, a: two slots for each, [a0, a2, b1, -].
    groups = Groups.of(torch.tensor([0, 1, 0]), 2)
    assert groups.slot_of_row.tolist() == [0, 2, 1]
    assert groups.row_of_slot.tolist() == [0, 2, 1, 0]


def test_unshared_rows_have_copies_of_their_prompts_without_the_forgotten_columns():
    cache, expected, generator = make([0, 1, 0], share=True, limit=9)
    append(cache, expected, generator, 4)
    assert cache.has_unread_columns()
    cache.unshare(5 + 4 - 1)
    expected = [[row[:, :-1] for row in layer] for layer in expected]
    assert_holds(cache, expected)
    assert not cache.has_unread_columns()
    assert cache.layers[0].room == 6  # 9 - 4 + 1
    append(cache, expected, generator, 6)
    assert_holds(cache, expected)


def test_rows_are_chosen_with_keep():
    with pytest.raises(NotImplementedError, match="keep"):
        make([0, 1], share=True)[0].batch_select_indices(torch.tensor([0]))
