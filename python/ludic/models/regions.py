"""Which part of a tensor a rank has, by arithmetic alone: chunks of rows, regions, owners of files.

A region is a range `(start, stop)` for each dimension of the whole tensor.

    a tensor of [5, 3] in 2 chunks of its rows
    rank 0 has ((0, 3), (0, 3)), rank 1 has ((3, 5), (0, 3))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

Region = tuple[tuple[int, int], ...]


def chunk_range(rows: int, chunks: int, index: int) -> tuple[int, int]:
    """The rows of a chunk, as `torch.chunk` cuts them. The last chunks may be empty.

    Example: 5 rows in 4 chunks of ceil(5 / 4) = 2 rows: (0, 2), (2, 4), (4, 5), (5, 5).
    """
    size = -(-rows // chunks)
    start = min(index * size, rows)
    return start, min(start + size, rows)


def find_region(shape: Sequence[int], mesh: Sequence[int], cut: Sequence[int | None], coordinate: Sequence[int]) -> Region:
    """The region at a coordinate of a mesh of ranks. `cut`: for each dimension of the mesh, the
    dimension of the tensor that it cuts, or None if it has copies.

    Example: on a mesh of 2 copies x 4 shards, cut is (None, 0). The rank at (1, 2) has the third
    quarter of the rows of the second copy. Two cuts of one dimension cut each chunk again.
    """
    region = [(0, size) for size in shape]
    for chunks, dimension, index in zip(mesh, cut, coordinate, strict=True):
        if dimension is not None:
            start, stop = region[dimension]
            first, last = chunk_range(stop - start, chunks, index)
            region[dimension] = (start + first, start + last)
    return tuple(region)


def find_copy(
    shape: Sequence[int], mesh: Sequence[int], cut: Sequence[int | None], owner: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], Region]]:
    """(coordinate, region) of the ranks that together have one copy of the tensor: those at the
    copy of `owner`. Empty regions are left out.

    Example: mesh 2 x 2, cut (None, 0), 4 rows, owner (1, 0): (1, 0) has the rows 0 and 1, (1, 1)
    the rows 2 and 3. The ranks of the other copy, at (0, 0) and (0, 1), have nothing to send.
    """
    ranges = [range(size) if dimension is not None else (place,) for size, dimension, place in zip(mesh, cut, owner, strict=True)]
    for coordinate in product(*ranges):
        region = find_region(shape, mesh, cut, coordinate)
        if count_elements(region):
            yield coordinate, region


def count_elements(region: Region) -> int:
    return math.prod(stop - start for start, stop in region)


def intersect(left: Region, right: Region) -> Region | None:
    """The region that is in both; None if they share no element.

    Example: rows (0, 3) and (2, 5) share (2, 3).
    """
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return None if any(start >= stop for start, stop in shared) else shared


def make_slices(region: Region, within: Region | None = None) -> tuple[slice, ...]:
    """Slices of the whole tensor, or of the part of it that has the region `within`.

    Example: the rows (4, 6) are the rows [1:3] of a part that has the rows (3, 8).
    """
    offsets = [0] * len(region) if within is None else [start for start, _ in within]
    return tuple(slice(start - offset, stop - offset) for (start, stop), offset in zip(region, offsets, strict=True))


def assign_owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Name -> the rank that writes it, so that each rank writes about as many bytes: the largest
    first, each to the rank with the least so far.

    Example: sizes a 5, b 4, c 3, d 1 on 2 ranks: a to 0, b to 1, c to 1, d to 0: 6 and 7 bytes. No
    rank gets more than the mean plus the largest.
    """
    loads = [0] * ranks
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner = loads.index(min(loads))
        loads[owner] += sizes[name]
        owners[name] = owner
    return {name: owners[name] for name in sizes}


def split_in_buckets(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """The names in their order, in buckets that end when they have `limit` bytes: a bucket is
    smaller than `limit` plus its last tensor.

    Example: sizes 3, 3, 1, 8, 2 with the limit 6: [3, 3], [1, 8], [2].
    """
    buckets: list[list[str]] = []
    filled = limit
    for name, size in sizes.items():
        if filled >= limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets
