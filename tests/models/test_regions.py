"""Which part of a tensor a rank has, against tensors that torch cuts, and numbers by hand."""

from itertools import product

import torch
from hypothesis import given, strategies as st

from ludic.models.regions import (
    assign_owners,
    chunk_range,
    count_elements,
    find_copy,
    find_region,
    intersect,
    make_slices,
    split_in_buckets,
)

SIZES = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 50), min_size=1)


@given(st.integers(0, 20), st.integers(1, 9))
def test_chunks_are_those_of_torch(rows, chunks):
    numbers = torch.arange(rows)
    cut = [part.tolist() for part in numbers.chunk(chunks)] if rows else []
    ours = [numbers[slice(*chunk_range(rows, chunks, index))].tolist() for index in range(chunks)]
    assert ours == cut + [[]] * (chunks - len(cut))


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=2),
    st.data(),
)
def test_the_ranks_of_a_copy_have_each_element_once(shape, mesh, data):
    cut = [data.draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh]
    owner = [data.draw(st.integers(0, size - 1)) for size in mesh]
    counts = torch.zeros(shape, dtype=torch.int64)
    for coordinate, region in find_copy(shape, mesh, cut, owner):
        assert region == find_region(shape, mesh, cut, coordinate)
        assert all(mine == theirs for mine, theirs, dim in zip(coordinate, owner, cut, strict=True) if dim is None)
        counts[make_slices(region)] += 1
    assert bool((counts == 1).all())


def test_a_hybrid_mesh_cuts_rows_within_each_copy():
    regions = {place: find_region((6, 3), (2, 2), (None, 0), place) for place in product(range(2), range(2))}
    assert regions[0, 0] == regions[1, 0] == ((0, 3), (0, 3))
    assert regions[0, 1] == regions[1, 1] == ((3, 6), (0, 3))
    assert [place for place, _ in find_copy((6, 3), (2, 2), (None, 0), (1, 0))] == [(1, 0), (1, 1)]
    assert [place for place, _ in find_copy((1, 3), (2, 2), (None, 0), (1, 0))] == [(1, 0)]  # the second half is empty
    assert find_region((8,), (2, 2), (0, 0), (1, 0)) == ((4, 6),)  # a chunk of a chunk


def test_shared_regions_and_the_slices_of_a_part():
    assert intersect(((0, 3), (0, 2)), ((2, 5), (0, 2))) == ((2, 3), (0, 2))
    assert intersect(((0, 3),), ((3, 5),)) is None
    assert make_slices(((4, 6),), within=((3, 8),)) == (slice(1, 3),)
    assert (count_elements(((2, 5), (0, 2))), count_elements(())) == (6, 1)


@given(SIZES, st.integers(1, 6))
def test_no_owner_has_more_than_the_mean_and_the_largest(sizes, ranks):
    owners = assign_owners(sizes, ranks)
    assert list(owners) == list(sizes)
    loads = [sum(sizes[name] for name in sizes if owners[name] == rank) for rank in range(ranks)]
    assert max(loads) <= sum(sizes.values()) / ranks + max(sizes.values())


def test_owners_by_hand():
    assert assign_owners({"a": 5, "b": 4, "c": 3, "d": 1}, 2) == {"a": 0, "b": 1, "c": 1, "d": 0}


@given(SIZES, st.integers(1, 60))
def test_buckets_keep_the_order_and_exceed_the_limit_by_less_than_a_tensor(sizes, limit):
    buckets = split_in_buckets(sizes, limit)
    assert [name for bucket in buckets for name in bucket] == list(sizes)
    for bucket in buckets:
        assert sum(sizes[name] for name in bucket[:-1]) < limit
    for bucket in buckets[:-1]:
        assert sum(sizes[name] for name in bucket) >= limit


def test_buckets_by_hand():
    assert split_in_buckets({"a": 3, "b": 3, "c": 1, "d": 8, "e": 2}, 6) == [["a", "b"], ["c", "d"], ["e"]]
